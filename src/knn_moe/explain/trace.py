"""Trace what a memory does to each token: the cases it recalls and the experts it changes.

Knows the attached memory through its handle's observer. Does not know the text of the cases
(reference/provenance.py) nor how a trace is shown (explanation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from knn_moe.errors import AttachError, ConfigError
from knn_moe.recall.layer import RouterCall
from knn_moe.routers.model_state import input_device


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


class Attached(Protocol):
    """The part of an attached memory's handle that a trace uses."""

    def observed(self, observer: Callable[[RouterCall], None]) -> AbstractContextManager[None]: ...

    def stats(self) -> Mapping[int, object]: ...


@torch.no_grad()
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
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ConfigError(f"trace takes token ids [B, T], got {list(input_ids.shape)}.")
    layers: dict[int, LayerTrace] = {}

    def keep(call: RouterCall) -> None:
        layers[call.layer] = _layer_trace(call)

    with routing.observed(keep), torch.compiler.set_stance("force_eager"):
        model(input_ids.to(input_device(model)), use_cache=False)
    missed = set(routing.stats()) - set(layers)
    if missed:
        raise AttachError(
            f"The model did not call the memory at layer {min(missed)}. Give trace the model that "
            f"the memory is attached to."
        )
    return layers


def _layer_trace(call: RouterCall) -> LayerTrace:
    squared_distance, rows = call.recall.nearest(call.inputs)
    weight = call.recall.weights(squared_distance)
    return LayerTrace(
        rows=rows.cpu(),
        squared_distance=squared_distance.cpu(),
        weight=weight.cpu(),
        confidence=call.confidence.cpu(),
        before=call.before.cpu(),
        after=call.after.cpu(),
        change=(call.mixed.float() - call.logits.float()).cpu(),
    )
