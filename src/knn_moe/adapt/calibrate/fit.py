"""Fit a memory's widths by gradient, on tokens that recall every example but their own; and with
them how much is made of what the build changed.

Neighbours are searched once, for the inputs of the model alone. Where layers below have been
mixed, inputs are a little different: their distances to the same neighbours are taken again, and
what else would have been near is left out. The judging (judge.py) searches afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knn_moe.adapt.calibrate.splits import Reading
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.config import LayerRouting, RoutingConfig
from knn_moe.errors import RouterNotCalledError
from knn_moe.index.exact import squared_distance
from knn_moe.index.leave_one_out import search_leaving_out
from knn_moe.memory.gamma import Gammas
from knn_moe.memory.memory import LayerMemory
from knn_moe.reference.provenance import Provenance
from knn_moe.reference.windows import TokenBatch
from knn_moe.routers.dense_gradients import DenseGradientHook
from knn_moe.routers.find import Router
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, input_device, install_hooks
from knn_moe.routers.own_logits import compute_own_logits

_RATE: Final = 0.1  # of Adam, falling to 0
_TOKENS: Final = 1024  # that are compared with their neighbours at a time


@dataclass(frozen=True)
class Cases:
    """One layer's memory on its router's device. Shapes: keys [M, d]; values [M, N]; owner [M];
    own [M, N], what the router gives the keys itself: to be had where values may be rescaled.
    `update_scale`: what came of that. ratio [M], as LayerRecall's."""

    router: Router
    keys: Tensor
    values: Tensor
    owner: Tensor
    gamma: float
    own: Tensor | None = None
    update_scale: float = 1.0
    ratio: Tensor | None = None

    @staticmethod
    def of(router: Router, layer: LayerMemory, owner: Tensor, where: Provenance) -> Cases:
        """Shapes: owner [M] int64."""
        keys, values, owner = (part.to(router.device) for part in (layer.keys, layer.values, owner))
        ratio = Gammas(layer.gamma, layer.gammas).ratio(where)
        ratio = None if ratio is None else ratio.to(router.device)
        return Cases(router, keys, values, owner, layer.gamma, ratio=ratio)

    def rescalable(self) -> Cases:
        return replace(self, own=compute_own_logits(self.router, self.keys))

    def nearest(self, inputs: Tensor, owner: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Of other examples: squared distances and rows [T, count]."""
        labels = [(owner.to(inputs.device), self.owner)]
        distance, rows = search_leaving_out(inputs, self.keys, labels, count, inputs.device)
        return self.in_layer_gamma(distance, rows), rows

    def in_layer_gamma(self, distance: Tensor, rows: Tensor) -> Tensor:
        """d² to cases of `rows`, to be multiplied by the layer's γ, not their domain's. [T, K]."""
        return distance if self.ratio is None else distance * self.ratio[rows]


@dataclass
class Neighbours:
    """One layer's nearest cases of other examples: rows [B·T, K] of each reading; and how far the
    first, the second … of them is, γ d² summed over the tokens that were counted."""

    rows: list[Tensor] = field(default_factory=list)
    distances: list[Tensor] = field(default_factory=list)  # [K] fp64 of each reading
    tokens: int = 0

    def add(self, rows: Tensor, scaled_distance: Tensor) -> None:
        """Shapes: rows [B·T, K]; scaled_distance [n, K], of the real tokens."""
        self.rows.append(rows)
        self.distances.append(scaled_distance.double().sum(dim=0).cpu())
        self.tokens += len(scaled_distance)

    def mean_distance(self, place: int) -> float:
        """Of the case that is nearest (0), second … of all."""
        total = sum(float(part[place]) for part in self.distances)
        return total / max(self.tokens, 1)


class Studied(NamedTuple):
    """Readings, and what each layer found near their tokens."""

    readings: Sequence[Reading]
    neighbours: Sequence[Neighbours]

    def and_then(self, more: Studied) -> Studied:
        """Both, without looking anything up again."""
        both = [
            Neighbours(
                [*one.rows, *other.rows],
                [*one.distances, *other.distances],
                one.tokens + other.tokens,
            )
            for one, other in zip(self.neighbours, more.neighbours, strict=True)
        ]
        return Studied([*self.readings, *more.readings], both)


class _Search:
    """Looks up each token's neighbours while the model reads, and changes nothing."""

    def __init__(self, cases: Cases, count: int) -> None:
        self.cases = cases
        self.count = count
        self.owner = torch.empty(0)
        self.found = Neighbours()

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        distance, rows = self.cases.nearest(inputs, self.owner, self.count)
        real = (self.owner != 0).to(distance.device)
        self.found.add(rows, self.cases.gamma * distance[real])
        return logits


class Mix:
    """Mixes by widths that are being fitted, with neighbours known beforehand. Its `cases` may
    have values with gradients."""

    def __init__(self, cases: Cases, widths: WidthParameters, k: int) -> None:
        self.cases = cases
        self.widths = widths
        self.k = k
        self.rows = torch.empty(0)

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        rows = self.rows[:, : self.k]
        distance = self._distance(inputs.detach(), rows)
        layer = self.cases.router.layer
        values = F.embedding(rows, self.cases.values)
        if self.cases.own is not None:
            values = self.widths.rescaled(layer, values, F.embedding(rows, self.cases.own))
        return self.widths.mix(layer, distance, values, logits)

    def _distance(self, inputs: Tensor, rows: Tensor) -> Tensor:
        """Squared, to the cases of `rows`; some tokens at a time, whose keys are many."""
        parts = zip(inputs.split(_TOKENS), rows.split(_TOKENS), strict=True)
        keys = self.cases.keys
        near = [squared_distance(part[:, None], keys[place]) for part, place in parts]
        return self.cases.in_layer_gamma(torch.cat(near), rows)


@contextmanager
def mixing(
    cases: Sequence[Cases], widths: WidthParameters, k: int, dense: nn.Module | None = None
) -> Iterator[list[Mix]]:
    """Every layer mixes inside; their `rows` are to be set for each batch. `dense`: the model, for
    gradients through all its experts (dense.py)."""
    mixes = [Mix(each, widths, k) for each in cases]
    hooks = [
        RouterHook(mix.cases.router, mix)
        if dense is None
        else DenseGradientHook(dense, mix.cases.router, mix)
        for mix in mixes
    ]
    with install_hooks(hooks):
        yield mixes


@torch.no_grad()
def find_neighbours(
    model: nn.Module, cases: Sequence[Cases], readings: Sequence[Reading], count: int
) -> Studied:
    """Each token's nearest cases of other examples, for each layer."""
    searches = [_Search(each, count) for each in cases]
    hooks = [RouterHook(search.cases.router, search) for search in searches]
    with freeze(model), install_hooks(hooks):
        for reading in readings:
            for search in searches:
                search.owner = reading.owner
            next_logits(model, reading.batch)
    for search in searches:
        calls = len(search.found.rows)
        if calls != len(readings):
            raise RouterNotCalledError(
                f"Router {search.cases.router.name!r} was called {calls} times in "
                f"{len(readings)} runs of the model, so its memory cannot be calibrated. A fused "
                f"block may go around it: load the model without it."
            )
    return Studied(readings, [search.found for search in searches])


def fit_widths(
    model: nn.Module,
    cases: Sequence[Cases],
    studied: Studied,
    start: RoutingConfig,
    steps: int,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[tuple[LayerRouting, ...], list[Cases]]:
    """The widths that make the readings likeliest, with the K and from the widths of `start`, if
    it has any; and the cases, with values rescaled for that where they may be."""
    device = cases[0].router.device
    with freeze(model), torch.enable_grad():
        gammas = {each.router.layer: each.gamma for each in cases}
        widths = WidthParameters(gammas, device, start.per_layer)
        adam = torch.optim.Adam(widths.parameters(), lr=_RATE)
        with mixing(cases, widths, start.k) as mixes:
            for step, place in enumerate(places(len(studied.readings), steps)):
                summed, count = recalled_loss(model, mixes, studied, place)
                adam.zero_grad()
                (summed / count).backward()
                adam.param_groups[0]["lr"] = _RATE * (1 - step / steps)
                adam.step()
                on_step()
        found = widths.found()
        with torch.no_grad():
            return found, [_rescale(each, widths) for each in cases]


def _rescale(cases: Cases, widths: WidthParameters) -> Cases:
    if cases.own is None:
        return cases
    layer = cases.router.layer
    values = widths.rescaled(layer, cases.values, cases.own)
    update_scale = cases.update_scale * float(widths.update_scale[widths.place[layer]].exp())
    return replace(cases, values=values, own=None, update_scale=update_scale)


def recalled_loss(
    model: nn.Module, mixes: Sequence[Mix], studied: Studied, place: int
) -> tuple[Tensor, int]:
    """Of one reading, every layer recalling what was found for it."""
    for mix, found in zip(mixes, studied.neighbours, strict=True):
        mix.rows = found.rows[place]
    return loss_of(model, studied.readings[place].batch)


def places(count: int, steps: int) -> list[int]:
    """Which reading each step takes: all of them, in any order, again and again."""
    chance = torch.Generator().manual_seed(0)
    rounds = [torch.randperm(count, generator=chance) for _ in range(-(-steps // count))]
    return torch.cat(rounds)[:steps].tolist()


def next_logits(model: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Next-token logits [B, T - 1, V], and the tokens to predict [B, T - 1], -100: not scored."""
    batch = batch.to(input_device(model))
    mask = batch.real.long() if batch.padded else None
    logits = model(input_ids=batch.ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    targets = batch.ids[:, 1:].masked_fill(~batch.scored[:, :-1], -100)
    return logits, targets.to(logits.device)


def loss_of(model: nn.Module, batch: TokenBatch) -> tuple[Tensor, int]:
    """Summed over the scored tokens, and how many they are."""
    logits, targets = next_logits(model, batch)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return loss, int((targets != -100).sum())


def losses(model: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Each line's summed loss and scored tokens. Shapes: [B] fp32, [B] int64, on the CPU."""
    logits, targets = next_logits(model, batch)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return loss.view(targets.shape).sum(dim=1).cpu(), (targets != -100).sum(dim=1).cpu()
