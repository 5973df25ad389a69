"""Trace what a memory does to each token: the cases it recalls, the experts it changes, and what
the model then predicts, beside what the model does alone.

Knows the attached memory through its handle's observers. Does not know the text of the cases
(reference/provenance.py) nor how a trace is shown (explanation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from knn_moe.errors import AttachError, ConfigError
from knn_moe.recall.layer import RouterCall
from knn_moe.routers.model_state import input_device

_LIKELIEST: Final = 5  # next tokens of either run
_NUMBERS: Final = 1 << 26  # logits that are held in fp32 at a time


@dataclass(frozen=True)
class LayerTrace:
    """What one layer recalled for T tokens, K cases each. All tensors are on the CPU."""

    rows: Tensor  # [T, K] int64, rows of the memory, nearest first
    squared_distance: Tensor  # [T, K] fp32, of the vectors that the similarity compares
    weight: Tensor  # [T, K], each case's share of the proposal
    confidence: Tensor  # [T], λ
    before: Tensor  # [T, top_k] int64, experts by the router's own logits, ascending
    after: Tensor  # [T, top_k] int64, experts by the mixed logits, ascending
    change: Tensor  # [T, N] fp32, Δlogit: mixed minus the router's own

    def swapped(self, token: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the experts that entered for a token, and those that left."""
        before, after = set(self.before[token].tolist()), set(self.after[token].tolist())
        return tuple(sorted(after - before)), tuple(sorted(before - after))


@dataclass(frozen=True)
class NextTokens:
    """Probabilities of C tokens after each of n tokens, by the model alone and with the memory.

    The first of the C is the token that came next, or any token where the text ends; then come the
    likeliest ones of either. Shapes: tokens [n, C] int64; alone, with_memory [n, C] fp32.
    """

    tokens: Tensor
    alone: Tensor
    with_memory: Tensor


@dataclass(frozen=True)
class TwoRuns:
    """A text read twice: with the memory, and by the model alone."""

    layers: dict[int, LayerTrace]
    experts_alone: dict[int, Tensor]  # [T, top_k] int64, ascending
    next_tokens: NextTokens | None  # of the last tokens; None: the model returns no logits


class Attached(Protocol):
    """The part of an attached memory's handle that a trace uses."""

    def observed(self, observer: Callable[[RouterCall], None]) -> AbstractContextManager[None]: ...

    def set_aside(
        self, observer: Callable[[int, Tensor], None]
    ) -> AbstractContextManager[None]: ...

    def stats(self) -> Mapping[int, object]: ...


def trace(model: nn.Module, routing: Attached, input_ids: Tensor) -> dict[int, LayerTrace]:
    """Run `model` once and return what each layer of its memory recalled.

    The run counts in `routing.stats()` like any other. Compiled models run uncompiled here.

    Args:
        model: The model that `routing` is attached to.
        routing: The handle of the attached memory.
        input_ids: Token ids without padding. Shape [B, T].

    Returns:
        {layer: trace of the B × T tokens, row after row}.

    Raises:
        ConfigError: `input_ids` has another shape, or no tokens.
        AttachError: The memory is attached to another model, or to none.
    """
    return _run(model, routing, input_ids)[0]


def trace_both(model: nn.Module, routing: Attached, ids: Tensor, first: int = 0) -> TwoRuns:
    """Run `model` on a text with its memory and then alone.

    Args:
        model: The model that `routing` is attached to.
        routing: The handle of the attached memory.
        ids: Token ids without padding. Shape [T].
        first: The first token after which next tokens are wanted.

    Raises:
        AttachError: The memory is attached to another model, or to none.
    """
    layers, output = _run(model, routing, ids[None])
    with_memory = _logits(output, len(ids), first)
    experts: dict[int, Tensor] = {}

    def keep(layer: int, chosen: Tensor) -> None:
        experts[layer] = chosen.cpu()

    with routing.set_aside(keep):
        alone = _logits(_forward(model, ids[None]), len(ids), first)
    predicted = None
    if with_memory is not None and alone is not None:
        predicted = _predict(alone, with_memory, ids[first:])
    return TwoRuns(layers, experts, predicted)


def _run(
    model: nn.Module, routing: Attached, input_ids: Tensor
) -> tuple[dict[int, LayerTrace], Any]:
    """Return the trace of a run with the memory, and the model's output."""
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ConfigError(f"trace takes token ids [B, T], got {list(input_ids.shape)}.")
    layers: dict[int, LayerTrace] = {}

    def keep(call: RouterCall) -> None:
        layers[call.layer] = _layer_trace(call)

    with routing.observed(keep):
        output = _forward(model, input_ids)
    missed = set(routing.stats()) - set(layers)
    if missed:
        raise AttachError(
            f"The model did not call the memory at layer {min(missed)}. Give trace the model that "
            f"the memory is attached to."
        )
    return layers, output


@torch.no_grad()
def _forward(model: nn.Module, input_ids: Tensor) -> Any:
    with torch.compiler.set_stance("force_eager"):
        return model(input_ids.to(input_device(model)), use_cache=False)


@torch.no_grad()
def _layer_trace(call: RouterCall) -> LayerTrace:
    (squared_distance, rows), weight = call.recall.recall_weighed(call.inputs)
    return LayerTrace(
        rows=rows.cpu(),
        squared_distance=squared_distance.cpu(),
        weight=weight.cpu(),
        confidence=call.confidence.cpu(),
        before=call.before.cpu(),
        after=call.after.cpu(),
        change=(call.mixed.float() - call.logits.float()).cpu(),
    )


def _logits(output: Any, tokens: int, first: int) -> Tensor | None:
    """Return the logits after the tokens from `first` on [n, V]; None if the output has none."""
    logits = getattr(output, "logits", None)
    fits = isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[:2] == (1, tokens)
    return logits[0, first:] if fits and isinstance(logits, Tensor) else None


@torch.no_grad()
def _predict(alone: Tensor, with_memory: Tensor, ids: Tensor) -> NextTokens:
    """Compare next tokens. Shapes: alone, with_memory [n, V]; ids [n], what was read."""
    following = torch.cat([ids[1:], ids[-1:]]).to(alone.device)
    rows = max(1, _NUMBERS // alone.shape[-1])
    parts = []
    for places in torch.arange(len(ids), device=alone.device).split(rows):
        both = [torch.softmax(logits[places].float(), dim=-1) for logits in (alone, with_memory)]
        likeliest = [one.topk(min(_LIKELIEST, one.shape[-1])).indices for one in both]
        tokens = torch.cat([following[places, None], *likeliest], dim=-1)
        parts.append([tokens.cpu(), *(one.gather(1, tokens).cpu() for one in both)])
    return NextTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))
