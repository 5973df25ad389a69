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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from knn_moe.build.build import reference_tokens
from knn_moe.equations.losses import next_token_losses
from knn_moe.equations.next_token import KS, WEIGHTS, likeliest_mixture
from knn_moe.errors import ConfigError, ReferenceSetError
from knn_moe.index import IndexConfig, build_index
from knn_moe.inference.hidden_states import HiddenStateHook, iter_hidden_states
from knn_moe.inference.language_head import HeadHooks, HeadMixture, HiddenHead
from knn_moe.methods.knn_moe import prepare_knn
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.recall.next_token import TokenIndex
from knn_moe.reference.windows import ReferenceTokens
from knn_moe.routers.model_state import forget_compiled_graphs, install_hooks, uncompiled
from knn_moe.support.progress import Progress

_HELD_OUT: Final = 0.15  # share of the examples on which K, λ and T are chosen
_MAX_NUMBERS: Final = 1 << 26  # that a search holds at a time


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
    keys, likelihood = _read_keys(context, replace(reference, kept=reference.scored))
    values = source.stream[source.key + 1].long()
    rest = (part.to(keys.device) for part in (values, likelihood, source.example))
    return TokenStore(keys, *rest)


def _read_keys(context: TaskContext, reference: ReferenceTokens) -> tuple[Tensor, Tensor]:
    """Return keys [M, d] and log-likelihoods [M] of all tokens with a next one, in their order."""
    likelihood = torch.empty(int(reference.kept.sum()))
    keys = torch.empty(0)
    done, total = 0, len(reference.kept)
    batch_tokens = context.build_config().batch_tokens
    for batch, logits, states, rows in iter_hidden_states(context.model, reference, batch_tokens):
        losses = next_token_losses(logits, batch.ids, batch.scored)
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
    ks = sorted({min(k, len(rest)) for k in ((config.k,) if config.k else KS)})
    distance, tokens = _search(rest.build_index(config.index), held_out.keys, ks[-1])
    best = likeliest_mixture(
        held_out.log_likelihood,
        distance,
        tokens == held_out.values[:, None],
        ks,
        None if config.temperature is None else [config.temperature],
        WEIGHTS if config.weight is None else [config.weight],
    )
    alone = -float(held_out.log_likelihood.double().mean())
    facts = {"tokens": len(held_out), "nll_alone": alone, "nll": best.loss}
    return replace(config, k=best.k, weight=best.weight, temperature=best.temperature), facts


def _search(index: TokenIndex, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Search some queries at a time: an exact search holds the candidates' keys of all of them."""
    parts = queries.split(max(1, _MAX_NUMBERS // (k * queries.shape[-1])))
    distance, tokens = zip(*(index.nearest(part, k) for part in parts), strict=True)
    return torch.cat(distance), torch.cat(tokens)


@dataclass(frozen=True)
class KnnLm(Method):
    """The model with a kNN-LM head. λ = 0: the model alone, bit for bit."""

    index: TokenIndex = field(repr=False)
    config: KnnLmConfig
    held_out: Mapping[str, Any] | None = None  # the losses by which K, λ and T were chosen
    name: str = "knn-lm"

    def facts(self) -> Mapping[str, Any]:
        facts = {"cases": len(self.index), **asdict(self.config)}
        return facts | ({"held_out": dict(self.held_out)} if self.held_out else {})

    @contextmanager
    def apply_to(self, model: nn.Module) -> Iterator[None]:
        """Replace the logits until the context is left, but not a loss that the model computes."""
        k, weight, temperature = self.config.k, self.config.weight, self.config.temperature
        if k is None or weight is None or temperature is None:
            raise ConfigError(
                f"k, weight and temperature must be given or chosen, got {self.config}."
            )
        mixture = HeadMixture(k, weight, temperature)
        head = HiddenHead(HiddenStateHook(model), self.index, mixture)
        forget_compiled_graphs()
        with install_hooks([HeadHooks(model, [head])] if weight else []):
            yield


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
