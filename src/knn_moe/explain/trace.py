"""What a memory did to each token of a text: the cases recalled, and the experts changed.

Knows the attached memory through its handle's observer. What the cases say is provenance.py's, and
how a trace is shown is somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from knn_moe.equations.mixing import neighbour_weights
from knn_moe.errors import AttachError, ConfigError
from knn_moe.recall.recall import RouterCall
from knn_moe.routers.model_state import input_device


@dataclass(frozen=True)
class LayerTrace:
    """One layer and T tokens, with K cases recalled for each; on the CPU."""

    rows: Tensor  # [T, K] int64, of the memory, nearest first
    # [T, K] fp32, of the vectors the similarity compares; times γ of the case's domain / γ of the
    # layer, where there are several
    squared_distance: Tensor
    weight: Tensor  # [T, K], each case's share of the proposal
    confidence: Tensor  # [T], λ
    before: Tensor  # [T, top_k] int64, experts of the router's own logits, ascending
    after: Tensor  # [T, top_k] int64, experts of the mixed logits, ascending
    change: Tensor  # [T, N] fp32, Δlogit: the mixed logits less the router's own

    def swapped(self, token: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The experts that came in for a token, and those that went out."""
        before, after = set(self.before[token].tolist()), set(self.after[token].tolist())
        return tuple(sorted(after - before)), tuple(sorted(before - after))


class Attached(Protocol):
    """What a trace asks of the handle of an attached memory."""

    def observed(self, observer: Callable[[RouterCall], None]) -> AbstractContextManager[None]: ...

    def stats(self) -> Mapping[int, object]: ...


@torch.no_grad()
def trace(model: nn.Module, routing: Attached, input_ids: Tensor) -> dict[int, LayerTrace]:
    """Run `model` once, with the memory of `routing` on it, and say what each layer recalled.

    The run counts in `routing.stats()` like any other. Compiled models run uncompiled here.
    Shapes: input_ids [B, T], every token real; the traces are of B × T tokens, row after row.
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
            f"The model ran past the memory at layer {min(missed)}: give trace the model that the "
            f"memory is attached to."
        )
    return layers


def _layer_trace(call: RouterCall) -> LayerTrace:
    squared_distance, rows = call.recall.nearest(call.inputs)
    weight = neighbour_weights(call.recall.log_similarity(squared_distance))
    return LayerTrace(
        rows=rows.cpu(),
        squared_distance=squared_distance.cpu(),
        weight=weight.cpu(),
        confidence=call.confidence.cpu(),
        before=call.before.cpu(),
        after=call.after.cpu(),
        change=(call.mixed.float() - call.logits.float()).cpu(),
    )
