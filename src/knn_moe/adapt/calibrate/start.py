"""Choose where the values start: how far they are moved from the router's own logits.

The build has found a direction for each case (§4.1); how far to go along it depends on the model.
Distances are relative to the spread of a layer's logits, so they mean the same on every model. The
ladder of them spans four orders of magnitude, and begins with no change at all. Each is
tried by reading a few batches, without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.fit import (
    FitCases,
    FitData,
    install_fitted_recall,
    mean_loss,
)
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.routers.model_state import freeze
from knn_moe.routers.own_logits import compute_own_logits

# The root mean square of what the values are moved by, relative to the spread of the logits.
DISTANCES: Final = (0.0, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Start:
    """Where the values start, the loss per token there, and every distance with its loss."""

    cases: list[FitCases]
    spreads: list[float]  # of each layer's logits
    distance: float
    losses: dict[float, float]


def choose_start(model: nn.Module, directions: Sequence[Direction], data: FitData, k: int) -> Start:
    """Try every distance on `data`."""
    losses = {
        distance: measure_loss(model, [each.at(distance) for each in directions], data, k)
        for distance in DISTANCES
    }
    best = min(losses, key=lambda distance: losses[distance])
    spreads = [each.spread for each in directions]
    return Start([each.at(best) for each in directions], spreads, best, losses)


@dataclass(frozen=True)
class Direction:
    """One layer's cases, their router's own logits [M, N], and the sizes of both."""

    cases: FitCases
    own: Tensor
    spread: float  # of the router's logits: their deviation from each token's mean
    change: float  # the root mean square of values - own

    @staticmethod
    def of(cases: FitCases) -> Direction:
        """Compute the router's own logits."""
        own = compute_own_logits(cases.router, cases.keys).to(cases.values.device)
        spread = _root_mean_square(own - own.mean(dim=-1, keepdim=True))
        return Direction(cases, own, spread, _root_mean_square(cases.values - own))

    def at(self, distance: float) -> FitCases:
        """Return the cases with their values moved so far."""
        scale = distance * self.spread / self.change if self.change > 0 else 0.0
        values = self.own + scale * (self.cases.values - self.own)
        return replace(self.cases, values=values, own=self.own, update_scale=scale)


def _root_mean_square(numbers: Tensor) -> float:
    return float(numbers.double().square().mean().sqrt())


@torch.no_grad()
def measure_loss(model: nn.Module, cases: Sequence[FitCases], data: FitData, k: int) -> float:
    """Return the loss per token of `data` with `cases` recalled; infinite if it is not finite."""
    total = tokens = 0.0
    with freeze(model), install_fitted_recall(cases, WidthParameters.of(cases), k) as recalls:
        for place, batch in enumerate(data.batches):
            count = int(batch.counts.sum())
            total += count * float(mean_loss(model, recalls, data, place))
            tokens += count
    return total / tokens if math.isfinite(total) else math.inf
