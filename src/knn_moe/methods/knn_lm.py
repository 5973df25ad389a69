"""kNN-LM (Khandelwal et al., 2020): what followed the nearest last hidden states, mixed in.

    p(y | x) = λ p_kNN(y | x) + (1 - λ) p_LM(y | x)
    p_kNN(y | x) ∝ Σ_i 1[y = v_i] exp(-‖h - k_i‖² / T), over the K nearest of the store

The store holds the tokens a routing memory is built of, in the same windows: for each that has a
next one, the input of the model's output embedding (k) and that next token (v). K, λ and T, where
they are not given, come from a part of the reference that is held out; nothing else is looked at.

Knows hidden states, logits and the tokens that follow; of routers only to put a routing memory on
as well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knn_moe.build.build import reference_tokens
from knn_moe.equations.next_token import WEIGHTS, mix_likelihoods, mix_next_token
from knn_moe.errors import ConfigError, ReferenceSetError, UnsupportedModelError
from knn_moe.index import IndexConfig, KeyIndex, build_index
from knn_moe.methods.knn_moe import prepare_knn
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.recall.layer import rows_of
from knn_moe.reference.windows import Batch, ReferenceTokens, make_batch, plan_batches
from knn_moe.routers.model_state import forget_compiled_graphs, freeze, input_device, unwrap
from knn_moe.support.progress import Progress

_HELD_OUT: Final = 0.15  # of the examples, to choose by
_KS: Final = (16, 64, 256)
_WIDTHS: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0)  # T, of the mean nearest squared distance
_NUMBERS: Final = 1 << 26  # that a search or a mixture holds at a time


@dataclass(frozen=True, kw_only=True)
class KnnLmConfig:
    """How the tokens of the store are found and weighed. None: chosen on held-out reference."""

    k: int | None = None
    weight: float | None = None  # λ
    temperature: float | None = None  # T, of squared distances
    index: IndexConfig = field(default_factory=IndexConfig)

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise ConfigError(f"k must be at least 1, got {self.k}.")
        if self.weight is not None and not 0 <= self.weight < 1:
            raise ConfigError(f"weight must be at least 0 and less than 1, got {self.weight}.")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature must be positive, got {self.temperature}.")


@dataclass(frozen=True)
class Store:
    """What the reference says comes next. Shapes: keys [M, d]; values [M] int64, the next token;
    own [M] fp32, its log-likelihood by the model alone; example [M] int64, whose token it is."""

    keys: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    own: Tensor = field(repr=False)
    example: Tensor = field(repr=False)

    def __len__(self) -> int:
        return len(self.values)

    def of(self, chosen: Tensor) -> Store:
        """Part of it. Shapes: chosen [M] bool."""
        return Store(*(part[chosen] for part in (self.keys, self.values, self.own, self.example)))

    def searched_by(self, config: IndexConfig) -> Neighbours:
        return Neighbours(build_index(self.keys, config, self.keys.device), self.values)


@dataclass(frozen=True)
class Neighbours:
    """A store that can be searched. Shapes: values [M] int64."""

    index: KeyIndex
    values: Tensor

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Squared distances, inf where an index found less than k, and the tokens that followed.

        Shapes: queries [T, d] → [T, k] fp32, nearest first; [T, k] int64.
        """
        # An exact search holds the candidates' keys of all its queries.
        parts = queries.split(max(1, _NUMBERS // (k * queries.shape[-1])))
        found = [self.index.search(part, k) for part in parts]
        places = rows_of(self.index, torch.cat([place for _, place in found]))
        return torch.cat([distance for distance, _ in found]), self.values[places]


class LastHidden:
    """The input of the model's output embedding in its latest run, hooked."""

    def __init__(self, model: nn.Module) -> None:
        head = unwrap(model).get_output_embeddings()
        if head is None:
            raise UnsupportedModelError(
                f"{type(unwrap(model)).__name__} names no output embedding, before which kNN-LM "
                f"reads its hidden states: give it a get_output_embeddings()."
            )
        self._seen: Tensor | None = None
        self.handle = head.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._seen = args[0].detach()

    def before(self, logits: Tensor) -> Tensor:
        """What `logits` [B, T, V] were made of: [B, T, d]."""
        seen, self._seen = self._seen, None
        if seen is None or seen.shape[:-1] != logits.shape[:-1]:
            shown = "nothing" if seen is None else list(seen.shape)
            raise UnsupportedModelError(
                f"The model gave logits {list(logits.shape)}, and its output embedding had read "
                f"{shown}: a fused head may go around it; load the model without."
            )
        return seen


def read_store(context: TaskContext) -> Store:
    """One pass of the model alone over the reference set's tokens."""
    model = getattr(context.model, "_orig_mod", context.model)
    config = context.build_config()
    reference = reference_tokens(model, context.tokenizer, context.examples, config)
    source = replace(reference.provenance, key=reference.scored.nonzero().flatten())
    if not len(source):
        raise ReferenceSetError("No example of the reference set has two tokens: nothing follows.")
    forget_compiled_graphs()
    with freeze(model), torch.no_grad():
        keys, own = _read(context, model, reference, config.batch_tokens)
    values = source.stream[source.key + 1].long()
    return Store(keys, *(part.to(keys.device) for part in (values, own, source.example)))


def _read(
    context: TaskContext, model: nn.Module, reference: ReferenceTokens, batch_tokens: int
) -> tuple[Tensor, Tensor]:
    """Keys [M, d] and likelihoods [M] of all tokens with a next one, in the reference's order."""
    hidden, device = LastHidden(model), input_device(model)
    row_of = reference.scored.cumsum(0) - 1
    own = torch.empty(int(row_of[-1]) + 1)
    keys: Tensor | None = None
    done, total = 0, len(reference.scored)
    try:
        for windows in plan_batches(reference.lengths, batch_tokens):
            batch = make_batch(reference, windows)
            start = torch.tensor([reference.bounds[window].start for window in windows])
            line, column = batch.scored.nonzero(as_tuple=True)
            rows = row_of[start[line] + column]
            read, own[rows] = _next_tokens(model, hidden, batch.to(device))
            keys = read.new_empty(len(own), read.shape[-1]) if keys is None else keys
            keys[rows.to(keys.device)] = read
            done += int(batch.real.sum())
            context.on_progress(Progress("reading the reference set", done, total))
    finally:
        hidden.handle.remove()
    if keys is None:
        raise ReferenceSetError("The reference set holds no tokens.")
    return keys, own


def _next_tokens(model: nn.Module, hidden: LastHidden, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of the batch's n tokens with a next one: hidden states [n, d], and log-likelihoods [n] of
    what is next, on the CPU. A sequence at a time: wide logits may not fit in fp32."""
    mask = batch.attention_mask
    logits = model(input_ids=batch.ids, attention_mask=mask, use_cache=False).logits
    states = hidden.before(logits)
    scored, ids = batch.scored.to(logits.device), batch.ids.to(logits.device)
    likelihoods = [
        -F.cross_entropy(row[kept].float(), line[1:][kept[:-1]], reduction="none")
        for row, line, kept in zip(logits, ids, scored, strict=True)
    ]
    return states[scored.to(states.device)], torch.cat(likelihoods).cpu()


def held_apart(store: Store, seed: int) -> tuple[Store, Store]:
    """Examples to choose by, and the others. Of one example, all tokens are on one side."""
    examples = store.example.unique().tolist()
    if len(examples) < 2:
        raise ReferenceSetError(
            "Of one example none can be held out to choose by: give more, or k, weight and "
            "temperature."
        )
    count = max(1, round(_HELD_OUT * len(examples)))
    drawn = torch.tensor(random.Random(seed).sample(examples, count), device=store.example.device)
    apart = torch.isin(store.example, drawn)
    return store.of(apart), store.of(~apart)


def choose(store: Store, config: KnnLmConfig, seed: int) -> tuple[KnnLmConfig, dict[str, Any]]:
    """K, λ and T for what comes next in examples the store has not seen, and how good they are.

    One search with the largest K serves every context that is tried.
    """
    asked, rest = held_apart(store, seed)
    ks = sorted({min(k, len(rest)) for k in ((config.k,) if config.k else _KS)})
    found = rest.searched_by(config.index).nearest(asked.keys, ks[-1])
    loss, k, weight, width = min(
        tried
        for k in ks
        for width in _temperatures(config, found[0])
        for tried in _tried(asked, found, k, width, config.weight)
    )
    alone = -float(asked.own.double().mean())
    held_out = {"tokens": len(asked), "nll_alone": alone, "nll": loss}
    return replace(config, k=k, weight=weight, temperature=width), held_out


def _temperatures(config: KnnLmConfig, distance: Tensor) -> list[float]:
    """T to try. Texts of one template share their beginnings: distances of 0 do not count."""
    if config.temperature is not None:
        return [config.temperature]
    nearest = distance[:, 0]
    nearest = nearest[(nearest > 0) & nearest.isfinite()]
    unit = float(nearest.mean()) if len(nearest) else 1.0
    return [unit * width for width in _WIDTHS]


def _tried(
    asked: Store, found: tuple[Tensor, Tensor], k: int, width: float, weight: float | None
) -> Iterator[tuple[float, int, float, float]]:
    """The mean loss of the tokens asked for by each λ, with that λ, K and T."""
    distance, tokens = (part[:, :k] for part in found)
    right = tokens == asked.values[:, None]
    weights = WEIGHTS if weight is None else (weight,)
    for tried, mixed in mix_likelihoods(asked.own, distance, right, width, weights):
        yield -float(mixed.double().mean()), k, tried, width


class KnnLmHead:
    """Puts log p(y | x) in the place of a model's logits."""

    def __init__(self, neighbours: Neighbours, config: KnnLmConfig) -> None:
        if config.k is None or config.weight is None or config.temperature is None:
            raise ConfigError(f"k, weight and temperature must be given or chosen, got {config}.")
        self.neighbours = neighbours
        self.k = min(config.k, len(neighbours.values))
        self.weight, self.temperature = config.weight, config.temperature

    @torch.no_grad()
    def mixed(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Log-probabilities, their softmax being the mixture. Shapes: hidden [..., d]; logits
        [..., V] → [..., V] fp32: tokens of small probability have none to spare in bf16."""
        queries, flat = hidden.flatten(0, -2), logits.flatten(0, -2)
        result = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
        at_once = max(1, _NUMBERS // flat.shape[-1])
        for start in range(0, len(flat), at_once):
            part = slice(start, start + at_once)
            result[part] = self._mix(queries[part], flat[part])
        return result.view(logits.shape)

    def _mix(self, queries: Tensor, logits: Tensor) -> Tensor:
        where = self.neighbours.values.device
        distance, tokens = self.neighbours.nearest(queries.to(where), self.k)
        distance, tokens = distance.to(logits.device), tokens.to(logits.device)
        return mix_next_token(logits, distance, tokens, self.weight, self.temperature)

    @contextmanager
    def apply_to(self, model: nn.Module) -> Iterator[None]:
        """Until the context is left. A loss the model computes itself stays that of its own."""
        hidden = LastHidden(model)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(getattr(output, "logits", None), Tensor):
                raise UnsupportedModelError(
                    f"{type(module).__name__} returned {type(output).__name__} without logits: "
                    f"call it with return_dict=True."
                )
            output.logits = self.mixed(hidden.before(output.logits), output.logits)
            return output

        forget_compiled_graphs()
        handle = unwrap(model).register_forward_hook(after)
        try:
            yield
        finally:
            handle.remove()
            hidden.handle.remove()


@dataclass(frozen=True)
class KnnLm(Method):
    """The model with a kNN-LM head. λ = 0: the model alone, bit for bit."""

    neighbours: Neighbours = field(repr=False)
    config: KnnLmConfig
    held_out: Mapping[str, Any] | None = None  # what K, λ and T were chosen by
    name: str = "knn-lm"

    def facts(self) -> Mapping[str, Any]:
        facts = {"cases": len(self.neighbours.values), **asdict(self.config)}
        return facts | ({"held_out": dict(self.held_out)} if self.held_out else {})

    def apply_to(self, model: nn.Module) -> AbstractContextManager[Any]:
        head = KnnLmHead(self.neighbours, self.config)
        return head.apply_to(model) if head.weight else nullcontext()


@dataclass(frozen=True)
class Together(Method):
    """Methods that change the model, put on one after the other."""

    parts: tuple[Method, ...]
    name: str

    def facts(self) -> Mapping[str, Any]:
        return {part.name: dict(part.facts()) for part in self.parts}

    @contextmanager
    def apply_to(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.apply_to(model))
            yield


def prepare_knn_lm(context: TaskContext, config: KnnLmConfig | None = None) -> KnnLm:
    """A store of the whole reference; K, λ and T as given, or chosen on a part of it."""
    store = context.cached("knn-lm-store", lambda: read_store(context))
    config = config or KnnLmConfig(index=context.index or IndexConfig())
    held_out = None
    if None in (config.k, config.weight, config.temperature):
        asked = config
        config, held_out = context.cached(
            f"knn-lm {asked}", lambda: choose(store, asked, context.seed)
        )
    return KnnLm(store.searched_by(config.index), config, held_out)


def prepare_both(context: TaskContext) -> Together:
    """A routing memory, and the kNN-LM head of the model alone.

    The store's keys, K, λ and T are those of kNN-LM alone: with the memory on, every reference
    token would find itself in it, and its hidden state would be like no other token's.
    """
    return Together((prepare_knn(context), prepare_knn_lm(context)), "knn+knn-lm")
