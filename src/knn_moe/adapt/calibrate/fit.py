"""Recall known neighbours by numbers that are being fitted, and fit a memory's widths by gradient,
on tokens that recall every example but their own.

Neighbours are looked up once, for the inputs of the model alone. Where layers below have been
mixed, inputs differ a little: their distances to the same neighbours are computed again, and other
cases that would have become nearer are left out. Judging (judge.py) looks up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knn_moe.adapt.calibrate.objective import line_losses
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.build.optimise import batch_losses
from knn_moe.config import LayerRouting, RoutingConfig
from knn_moe.errors import RouterNotCalledError
from knn_moe.index.exact import distances_to_rows
from knn_moe.recall.leave_one_out import Cases
from knn_moe.recall.neighbours import weigh
from knn_moe.reference.windows import Batch
from knn_moe.routers.dense_gradients import DenseGradientHook
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, input_device, install_hooks

_RATE: Final = 0.1  # of Adam, falling to 0
_LEAST_WINDOWS: Final = 6  # of a sample


@dataclass(frozen=True)
class FitCases(Cases):
    """Cases whose values are being fitted.

    Shapes: own [M, N], the router's own logits for the keys; None: values are not rescaled. linear
    [N, d], a map of the keys that is added to the values; None: there is none.
    """

    own: Tensor | None = None
    linear: Tensor | None = None
    update_scale: float = 1.0  # how far the values were moved from the router's own logits

    def values_at(self, rows: Tensor, parameters: WidthParameters) -> Tensor:
        """Return the values of the cases of `rows`. Shapes: [T, K] → [T, K, N]."""
        values = self.values
        if self.linear is not None:
            values = values + (self.keys @ self.linear.T.to(self.keys.dtype)).float()
        found = F.embedding(rows, values)
        if self.own is None:
            return found
        return parameters.rescale(self.router.layer, found, F.embedding(rows, self.own))

    def rescaled(self, parameters: WidthParameters) -> FitCases:
        """Return the cases with the update scale written into the values."""
        if self.own is None:
            return self
        layer = self.router.layer
        values = parameters.rescale(layer, self.values, self.own)
        scale = self.update_scale * float(parameters.update_scale(layer))
        return replace(self, values=values, own=None, update_scale=scale)


@dataclass
class NeighbourTable:
    """One layer's neighbours of all batches: rows [B·T, K] of each, and γ d² summed over tokens."""

    rows: list[Tensor] = field(default_factory=list)
    distances: list[Tensor] = field(default_factory=list)  # [K] fp64 of each batch
    tokens: int = 0

    def add(self, rows: Tensor, scaled_distance: Tensor) -> None:
        """Add a batch. Shapes: rows [B·T, K]; scaled_distance [n, K], of the real tokens."""
        self.rows.append(rows)
        self.distances.append(scaled_distance.double().sum(dim=0).cpu())
        self.tokens += len(scaled_distance)

    def mean_distance(self, place: int) -> float:
        """Return the mean γ d² to the nearest case (0), the second (1) …"""
        total = sum(float(part[place]) for part in self.distances)
        return total / max(self.tokens, 1)


class FitData(NamedTuple):
    """Batches to fit on, and the neighbours of their tokens in each layer."""

    batches: Sequence[Batch]
    tables: Sequence[NeighbourTable]

    def sample(self, tokens: int) -> FitData:
        """Draw batches at random until they hold so many tokens, and six windows; distractors are
        not counted."""
        drawn: list[int] = []
        held = windows = 0
        for place in batch_order(len(self.batches), len(self.batches)):
            if held >= tokens and windows >= _LEAST_WINDOWS:
                break
            drawn.append(place)
            counted = self.batches[place].counts > 0
            held += int(self.batches[place].real[counted].sum())
            windows += int(counted.sum())
        tables = [NeighbourTable([table.rows[place] for place in drawn]) for table in self.tables]
        return FitData([self.batches[place] for place in drawn], tables)

    def extend(self, more: FitData) -> FitData:
        """Append `more` without looking anything up again."""
        tables = [
            NeighbourTable(
                [*one.rows, *other.rows],
                [*one.distances, *other.distances],
                one.tokens + other.tokens,
            )
            for one, other in zip(self.tables, more.tables, strict=True)
        ]
        return FitData([*self.batches, *more.batches], tables)


class _LookUp:
    """A router callback that looks up neighbours and changes nothing."""

    def __init__(self, cases: Cases, k: int) -> None:
        self.cases = cases
        self.k = k
        self.owner = torch.empty(0)
        self.table = NeighbourTable()

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        near = self.cases.nearest(inputs, self.owner, self.k)
        real = (self.owner != 0).to(inputs.device)
        self.table.add(near.rows, self.cases.gamma * near.squared_distance[real])
        return logits


class FittedRecall:
    """A router callback that recalls known neighbours by widths that are being fitted.

    The first token of each line is spared. `rows` and `spared` are to be set for each batch. The
    cases may have values with gradients.
    """

    def __init__(self, cases: FitCases, parameters: WidthParameters, k: int) -> None:
        self.cases = cases
        self.parameters = parameters
        self.k = k
        self.rows = self.spared = torch.empty(0)

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        rows = self.rows[:, : self.k]
        distance = distances_to_rows(inputs.detach(), self.cases.keys, rows)
        layer = self.cases.router.layer
        values = self.cases.values_at(rows, self.parameters)
        widths = self.parameters.widths(layer, logits.device)
        recalled = weigh(distance, values, widths, self.cases.similarity)
        return recalled.spare(self.spared).mix(logits)


@contextmanager
def install_fitted_recall(
    cases: Sequence[FitCases], parameters: WidthParameters, k: int, dense: nn.Module | None = None
) -> Iterator[list[FittedRecall]]:
    """Let every layer recall by `parameters` inside.

    Args:
        cases: Of each layer.
        parameters: The widths of all layers.
        k: How many neighbours are recalled.
        dense: The model, for gradients through all its experts. None: through the chosen ones.
    """
    recalls = [FittedRecall(each, parameters, k) for each in cases]
    hooks = [
        RouterHook(recall.cases.router, recall)
        if dense is None
        else DenseGradientHook(dense, recall.cases.router, recall)
        for recall in recalls
    ]
    with install_hooks(hooks):
        yield recalls


@torch.no_grad()
def look_up_neighbours(
    model: nn.Module, cases: Sequence[Cases], batches: Sequence[Batch], k: int
) -> FitData:
    """Find each token's k nearest cases of other examples, in each layer.

    Raises:
        RouterNotCalledError: The model bypasses a router.
    """
    look_ups = [_LookUp(each, k) for each in cases]
    hooks = [RouterHook(look_up.cases.router, look_up) for look_up in look_ups]
    with freeze(model), install_hooks(hooks):
        for batch in batches:
            for look_up in look_ups:
                look_up.owner = batch.token_owner
            batch_losses(model, batch.to(input_device(model)))
    for look_up in look_ups:
        calls = len(look_up.table.rows)
        if calls != len(batches):
            raise RouterNotCalledError(
                f"Router {look_up.cases.router.name!r} was called {calls} times in "
                f"{len(batches)} runs of the model, so its memory cannot be calibrated. A fused "
                f"block may bypass it: load the model without it."
            )
    return FitData(batches, [look_up.table for look_up in look_ups])


def fit_widths(
    model: nn.Module,
    cases: Sequence[FitCases],
    data: FitData,
    start: RoutingConfig,
    steps: int,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[tuple[LayerRouting, ...], list[FitCases]]:
    """Fit the widths that make `data` likeliest.

    Args:
        model: The model alone.
        cases: Of each layer; values are rescaled along where they have their router's own logits.
        data: Batches and neighbours.
        start: K, and the widths to start from, if it has any for single layers.
        steps: Of Adam.
        on_step: Called after each step.

    Returns:
        The widths of each layer, and the cases with rescaled values.

    Raises:
        DivergedError: The fit diverged.
    """
    with freeze(model), torch.enable_grad():
        parameters = WidthParameters.of(cases, start.per_layer)
        adam = torch.optim.Adam(parameters.parameters(), lr=_RATE)
        with install_fitted_recall(cases, parameters, start.k) as recalls:
            for step, place in enumerate(batch_order(len(data.batches), steps)):
                adam.zero_grad()
                mean_loss(model, recalls, data, place).backward()
                adam.param_groups[0]["lr"] = _RATE * (1 - step / steps)
                adam.step()
                on_step()
        widths = parameters.read()
        with torch.no_grad():
            return widths, [each.rescaled(parameters) for each in cases]


def mean_loss(
    model: nn.Module, recalls: Sequence[FittedRecall], data: FitData, place: int
) -> Tensor:
    """Return the mean loss of a batch's scored tokens or choices, with every layer recalling."""
    batch = data.batches[place]
    spared = batch.first_tokens.to(input_device(model))
    for recall, table in zip(recalls, data.tables, strict=True):
        recall.rows, recall.spared = table.rows[place], spared
    return line_losses(model, batch).sum() / int(batch.counts.sum())


def batch_order(count: int, steps: int) -> list[int]:
    """Return the batch of each step: all of them in random order, again and again."""
    generator = torch.Generator().manual_seed(0)
    rounds = [torch.randperm(count, generator=generator) for _ in range(-(-steps // count))]
    return torch.cat(rounds)[:steps].tolist()
