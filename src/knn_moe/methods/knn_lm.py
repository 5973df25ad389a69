"""kNN-LM (Khandelwal et al., 2020): mix in the tokens that followed the nearest hidden states.

    p(y | x) = λ p_kNN(y | x) + (1 - λ) p_LM(y | x)
    p_kNN(y | x) ∝ Σ_i 1[y = v_i] exp(-‖h - k_i‖² / T), over the K nearest of the store

The store holds the tokens of which a routing memory would be built, in the same windows: for each
token that has a next one, the input of the model's output embedding (k) and the next token (v).
Where K, λ and T are not given, they are chosen on a held-out part of the reference set.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from knn_moe.build.build import reference_tokens
from knn_moe.equations.losses import next_token_losses
from knn_moe.equations.next_token import WEIGHTS, mix_likelihoods, mix_next_token
from knn_moe.errors import ConfigError, ReferenceSetError, UnsupportedModelError
from knn_moe.index import IndexConfig, KeyIndex, build_index
from knn_moe.methods.knn_moe import prepare_knn
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.recall.layer import rows_of
from knn_moe.reference.windows import ReferenceTokens, make_batch, plan_batches
from knn_moe.routers.model_state import (
    forget_compiled_graphs,
    freeze,
    input_device,
    install_hooks,
    uncompiled,
    unwrap,
)
from knn_moe.support.progress import Progress

_HELD_OUT: Final = 0.15  # share of the examples on which K, λ and T are chosen
_KS: Final = (16, 64, 256)
# T, in units of the mean squared distance to the nearest key.
_TEMPERATURES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0)
_MAX_NUMBERS: Final = 1 << 26  # that a search or a mixture holds at a time


@dataclass(frozen=True, kw_only=True)
class KnnLmConfig:
    """How the tokens of the store are found and weighed. None: chosen on the held-out part."""

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
class TokenStore:
    """The hidden states of the reference set and their next tokens.

    Shapes: keys [M, d]; values [M] int64, the next tokens; log_likelihood [M] fp32, of these by the
    model alone; example [M] int64, the example that a token is from.
    """

    keys: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    log_likelihood: Tensor = field(repr=False)
    example: Tensor = field(repr=False)

    def __len__(self) -> int:
        return len(self.values)

    def select(self, chosen: Tensor) -> TokenStore:
        """Return a part of the store. Shapes: chosen [M] bool."""
        parts = self.keys, self.values, self.log_likelihood, self.example
        return TokenStore(*(part[chosen] for part in parts))

    def build_index(self, config: IndexConfig) -> TokenIndex:
        """Make the store searchable."""
        return TokenIndex(build_index(self.keys, config, self.keys.device), self.values)


@dataclass(frozen=True)
class TokenIndex:
    """A searchable store. Shapes: values [M] int64."""

    index: KeyIndex
    values: Tensor

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the squared distances of the k nearest keys and the tokens that followed them.

        Shapes: queries [T, d]. Result [T, k] fp32, nearest first, inf where an index found fewer
        than k; and [T, k] int64.
        """
        # An exact search holds the candidates' keys of all its queries.
        parts = queries.split(max(1, _MAX_NUMBERS // (k * queries.shape[-1])))
        found = [self.index.search(part, k) for part in parts]
        places = rows_of(self.index, torch.cat([place for _, place in found]))
        return torch.cat([distance for distance, _ in found]), self.values[places]


class HiddenStateHook:
    """Records the input of the model's output embedding in its latest forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._output = unwrap(model).get_output_embeddings()
        if self._output is None:
            raise UnsupportedModelError(
                f"{type(unwrap(model)).__name__} has no output embedding, and kNN-LM reads its "
                f"input. Define get_output_embeddings() on the model."
            )
        self._recorded: Tensor | None = None

    def install(self) -> Sequence[RemovableHandle]:
        return [self._output.register_forward_hook(self._record)]

    def _record(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._recorded = args[0].detach()

    def take(self, logits: Tensor) -> Tensor:
        """Return the hidden states [B, T, d] from which `logits` [B, T, V] were computed."""
        recorded, self._recorded = self._recorded, None
        if recorded is None or recorded.shape[:-1] != logits.shape[:-1]:
            shown = "nothing" if recorded is None else list(recorded.shape)
            raise UnsupportedModelError(
                f"The model returned logits {list(logits.shape)}, but its output embedding read "
                f"{shown}. A fused head may bypass it: load the model without it."
            )
        return recorded


def read_store(context: TaskContext) -> TokenStore:
    """Read the reference set once with the model alone.

    Raises:
        ReferenceSetError: No token of the reference set has a next one.
    """
    model = uncompiled(context.model)
    config = context.build_config()
    reference = reference_tokens(model, context.tokenizer, context.examples, config)
    source = replace(reference.provenance, key=reference.scored.nonzero().flatten())
    if not len(source):
        raise ReferenceSetError(
            "kNN-LM needs an example of at least two tokens, and the reference set has none."
        )
    forget_compiled_graphs()
    with freeze(model), torch.no_grad():
        keys, likelihood = _read_keys(context, model, reference, config.batch_tokens)
    values = source.stream[source.key + 1].long()
    rest = (part.to(keys.device) for part in (values, likelihood, source.example))
    return TokenStore(keys, *rest)


def _read_keys(
    context: TaskContext, model: nn.Module, reference: ReferenceTokens, batch_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return keys [M, d] and log-likelihoods [M] of all tokens with a next one, in their order."""
    hidden, device = HiddenStateHook(model), input_device(model)
    row_of = reference.scored.cumsum(0) - 1
    likelihood = torch.empty(int(row_of[-1]) + 1)
    keys = torch.empty(0)
    done, total = 0, len(reference.scored)
    with install_hooks([hidden]):
        for windows in plan_batches(reference.lengths, batch_tokens):
            batch = make_batch(reference, windows).to(device)
            mask = batch.attention_mask
            logits = model(input_ids=batch.ids, attention_mask=mask, use_cache=False).logits
            losses = next_token_losses(logits, batch.ids, batch.scored)
            states = hidden.take(logits)
            states = states[batch.scored.to(states.device)]
            start = torch.tensor([reference.bounds[window].start for window in windows])
            line, column = batch.scored.cpu().nonzero(as_tuple=True)
            rows = row_of[start[line] + column]
            likelihood[rows] = -losses[batch.scored[:, :-1].to(losses.device)].cpu()
            keys = keys if len(keys) else states.new_empty(len(likelihood), states.shape[-1])
            keys[rows.to(keys.device)] = states
            done += int(batch.real.sum())
            context.on_progress(Progress("reading the reference set", done, total))
    return keys, likelihood


def hold_out(store: TokenStore, seed: int) -> tuple[TokenStore, TokenStore]:
    """Split a store by examples into a held-out part and the rest.

    Raises:
        ReferenceSetError: All tokens are of one example.
    """
    examples = store.example.unique().tolist()
    if len(examples) < 2:
        raise ReferenceSetError(
            "Choosing k, weight and temperature needs at least two examples, one of them held out. "
            "Use a larger reference set, or give all three."
        )
    count = max(1, round(_HELD_OUT * len(examples)))
    chosen = torch.tensor(random.Random(seed).sample(examples, count), device=store.example.device)
    held_out = torch.isin(store.example, chosen)
    return store.select(held_out), store.select(~held_out)


def choose(store: TokenStore, config: KnnLmConfig, seed: int) -> tuple[KnnLmConfig, dict[str, Any]]:
    """Choose K, λ and T on held-out examples; one search with the largest K serves all trials.

    Returns:
        The config without None, and the held-out loss with it and without kNN-LM.
    """
    held_out, rest = hold_out(store, seed)
    ks = sorted({min(k, len(rest)) for k in ((config.k,) if config.k else _KS)})
    found = rest.build_index(config.index).nearest(held_out.keys, ks[-1])
    loss, k, weight, temperature = min(
        trial
        for k in ks
        for temperature in _temperatures(config, found[0])
        for trial in _try_weights(held_out, found, k, temperature, config.weight)
    )
    alone = -float(held_out.log_likelihood.double().mean())
    facts = {"tokens": len(held_out), "nll_alone": alone, "nll": loss}
    return replace(config, k=k, weight=weight, temperature=temperature), facts


def _temperatures(config: KnnLmConfig, distance: Tensor) -> list[float]:
    """Return the T to try. Distances of 0 do not count: texts of one template share beginnings."""
    if config.temperature is not None:
        return [config.temperature]
    nearest = distance[:, 0]
    nearest = nearest[(nearest > 0) & nearest.isfinite()]
    unit = float(nearest.mean()) if len(nearest) else 1.0
    return [unit * factor for factor in _TEMPERATURES]


def _try_weights(
    held_out: TokenStore,
    found: tuple[Tensor, Tensor],
    k: int,
    temperature: float,
    weight: float | None,
) -> Iterator[tuple[float, int, float, float]]:
    """Yield the mean loss of the held-out tokens for each λ, with K, λ and T."""
    distance, tokens = (part[:, :k] for part in found)
    right = tokens == held_out.values[:, None]
    weights = WEIGHTS if weight is None else (weight,)
    own = held_out.log_likelihood
    for tried, mixed in mix_likelihoods(own, distance, right, temperature, weights):
        yield -float(mixed.double().mean()), k, tried, temperature


class KnnLmHead:
    """Replaces a model's logits by log p(y | x)."""

    def __init__(self, index: TokenIndex, config: KnnLmConfig) -> None:
        if config.k is None or config.weight is None or config.temperature is None:
            raise ConfigError(f"k, weight and temperature must be given or chosen, got {config}.")
        self.index = index
        self.k = min(config.k, len(index.values))
        self.weight, self.temperature = config.weight, config.temperature

    @torch.no_grad()
    def mix(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the mixture.

        Shapes: hidden [..., d]; logits [..., V]. Result [..., V] fp32, because bf16 is too coarse
        for tokens of small probability.
        """
        queries, flat = hidden.flatten(0, -2), logits.flatten(0, -2)
        result = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
        at_once = max(1, _MAX_NUMBERS // flat.shape[-1])
        for start in range(0, len(flat), at_once):
            part = slice(start, start + at_once)
            found = self.index.nearest(queries[part].to(self.index.values.device), self.k)
            distance, tokens = (each.to(flat.device) for each in found)
            result[part] = mix_next_token(
                flat[part], distance, tokens, self.weight, self.temperature
            )
        return result.view(logits.shape)

    @contextmanager
    def apply_to(self, model: nn.Module) -> Iterator[None]:
        """Replace the logits until the context is left, but not a loss that the model computes."""
        forget_compiled_graphs()
        with install_hooks([MixtureHook(model, self)]):
            yield


class MixtureHook(HiddenStateHook):
    """Replaces the logits of each forward pass by those of a kNN-LM head."""

    def __init__(self, model: nn.Module, head: KnnLmHead) -> None:
        super().__init__(model)
        self._model = unwrap(model)
        self._mix = head.mix

    def install(self) -> Sequence[RemovableHandle]:
        return [*super().install(), self._model.register_forward_hook(self._replace_logits)]

    def _replace_logits(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(getattr(output, "logits", None), Tensor):
            raise UnsupportedModelError(
                f"{type(module).__name__} returned {type(output).__name__} without logits: call it "
                f"with return_dict=True."
            )
        output.logits = self._mix(self.take(output.logits), output.logits)
        return output


@dataclass(frozen=True)
class KnnLm(Method):
    """The model with a kNN-LM head. λ = 0: the model alone, bit for bit."""

    index: TokenIndex = field(repr=False)
    config: KnnLmConfig
    held_out: Mapping[str, Any] | None = None  # the losses by which K, λ and T were chosen
    name: str = "knn-lm"

    def facts(self) -> Mapping[str, Any]:
        facts = {"cases": len(self.index.values), **asdict(self.config)}
        return facts | ({"held_out": dict(self.held_out)} if self.held_out else {})

    def apply_to(self, model: nn.Module) -> AbstractContextManager[Any]:
        head = KnnLmHead(self.index, self.config)
        return head.apply_to(model) if head.weight else nullcontext()


@dataclass(frozen=True)
class CombinedMethod(Method):
    """Several methods that change the model, applied one after the other."""

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
    """Store the whole reference set; choose what `config` leaves open on a held-out part of it."""
    store = context.cached("knn-lm-store", lambda: read_store(context))
    config = config or KnnLmConfig(index=context.index or IndexConfig())
    held_out = None
    if None in (config.k, config.weight, config.temperature):
        given = config
        config, held_out = context.cached(
            f"knn-lm {given}", lambda: choose(store, given, context.seed)
        )
    return KnnLm(store.build_index(config.index), config, held_out)


def prepare_both(context: TaskContext) -> CombinedMethod:
    """Combine a routing memory with the kNN-LM head of the model alone.

    The store's keys, K, λ and T are those of kNN-LM alone: with the memory attached, every
    reference token would recall itself, and its hidden state would be unlike any other token's.
    """
    return CombinedMethod((prepare_knn(context), prepare_knn_lm(context)), "knn+knn-lm")
