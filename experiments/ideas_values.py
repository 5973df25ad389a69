"""Values that learn from the tokens that recall them, in several ways, for ideas.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.fit import Cases, Mix, Neighbours, Studied, loss_of, places
from knn_moe.adapt.calibrate.judge import Recall
from knn_moe.adapt.calibrate.splits import Reading
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.config import LayerRouting, RoutingConfig
from knn_moe.equations.mixing import confidence, mix_logits, propose_logits
from knn_moe.inference.gate import own_logits
from knn_moe.routers.dense_gradients import dense_gradient
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, install_hooks

_WIDTH_RATE = 0.03


@dataclass(frozen=True)
class Learning:
    """`dense`: slopes through all experts; `dropped`: of the neighbours, at every step anew;
    `rekeyed`: before this pass, keys are taken again with the memory on; `blank`: from the router's
    own logits on, nothing of what the build found; `rescaled`: from changes on that were made more
    or less of, when the widths were fitted."""

    k: int = 16
    rate: float = 0.1
    passes: int = 2
    dense: bool = False
    dropped: float = 0.0
    rekeyed: tuple[int, ...] = ()
    blank: bool = False
    rescaled: bool = False


LEARNINGS: dict[str, Learning] = {
    "values learned": Learning(),
    "values learned, rate 0.05": Learning(rate=0.05),
    "values learned, rate 0.2": Learning(rate=0.2),
    "values learned, from the router's own": Learning(blank=True),
    "values learned, dense": Learning(dense=True),
    "values learned, dense, K = 32": Learning(dense=True, k=32),
    "values learned, dense, K = 32, rescaled": Learning(dense=True, k=32, rescaled=True),
    "values learned, dense, 3 passes": Learning(dense=True, passes=3),
    "values learned, dense, a third dropped": Learning(dense=True, dropped=0.3),
    "values learned, dense, a third dropped, 4 passes": Learning(dense=True, dropped=0.3, passes=4),
    "values learned, dense, keys again": Learning(dense=True, rekeyed=(0,)),
    "values learned, dense, keys again, halfway": Learning(dense=True, rekeyed=(1,)),
    "values learned, dense, keys again at both": Learning(dense=True, rekeyed=(0, 1)),
}


class Dropping(Mix):
    """Mixes, leaving out some of the neighbours when they are weighed."""

    def __init__(self, cases: Cases, widths: WidthParameters, k: int, dropped: float) -> None:
        super().__init__(cases, widths, k)
        self.dropped = dropped

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        rows = self.rows[:, : self.k]
        with torch.no_grad():
            apart = inputs.detach()[:, None].float() - self.cases.keys[rows].float()
            distance = apart.square().sum(dim=-1)
            out = torch.rand_like(distance) < self.dropped
            out[:, 0] &= ~out.all(dim=-1)
        weight, wide, confidence_factor = self.widths.raw[
            self.widths.place[self.cases.router.layer]
        ]
        near = -self.cases.gamma * weight.exp() * distance
        values = torch.nn.functional.embedding(rows, self.cases.values)
        proposal = propose_logits(values, near.masked_fill(out, float("-inf")))
        sure = confidence_factor.sigmoid() * confidence(-self.cases.gamma * wide.exp() * distance)
        return mix_logits(logits.float(), proposal, sure).to(logits.dtype)


def learn(
    model: nn.Module,
    start: tuple[tuple[LayerRouting, ...], list[Cases]],
    studied: Studied,
    how: Learning,
) -> tuple[tuple[LayerRouting, ...], list[Cases]]:
    """WidthParameters from those of `start` on, and its cases with other values, and keys where `how` says
    so."""
    kernels_before, cases = start
    learning = [replace(each, values=each.values.clone()) for each in cases]
    if how.blank:
        with torch.no_grad():
            learning = [
                replace(each, values=own_logits(each.router, each.keys).float())
                for each in learning
            ]
    gammas = {each.router.layer: each.gamma for each in cases}
    with freeze(model), torch.enable_grad():
        widths = WidthParameters(gammas, cases[0].keys.device, kernels_before)
        values = [each.values.requires_grad_() for each in learning]
        rates = (_WIDTH_RATE, how.rate)
        groups: list[dict[str, Any]] = [{"params": [widths.raw]}, {"params": values}]
        adam = torch.optim.Adam(groups, lr=how.rate, betas=(0.9, 0.99), eps=1e-12)
        steps = how.passes * len(studied.readings)
        for step, place in enumerate(places(len(studied.readings), steps)):
            turn, first = divmod(step, len(studied.readings))
            if not first and turn in how.rekeyed:
                config = RoutingConfig(k=how.k, per_layer=widths.found())
                learning = rekeyed(model, learning, studied.readings, config)
                studied = searched(model, learning, studied.readings, config)
            mixes = [Dropping(each, widths, how.k, how.dropped) for each in learning]
            with install_hooks([hook(model, mix, how.dense) for mix in mixes]):
                for mix, found in zip(mixes, studied.neighbours, strict=True):
                    mix.rows = found.rows[place]
                summed, count = loss_of(model, studied.readings[place].batch)
                adam.zero_grad()
                (summed / count).backward()
            for group, most in zip(adam.param_groups, rates, strict=True):
                group["lr"] = most * (1 - step / steps)
            adam.step()
    return widths.found(), [replace(each, values=each.values.detach()) for each in learning]


def hook(model: nn.Module, mix: Mix, dense: bool) -> RouterHook:
    if dense:
        return dense_gradient(model, mix.cases.router, mix)
    return RouterHook(mix.cases.router, mix)


class _Recording(Recall):
    """Recalls every example but the token's own, and keeps what it read and found."""

    def __init__(self, cases: Cases, config: RoutingConfig) -> None:
        super().__init__(cases, config)
        self.inputs: list[Tensor] = []
        self.rows: list[Tensor] = []

    def nearest(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        distance, rows = super().nearest(inputs)
        self.inputs.append(inputs.detach())
        self.rows.append(rows)
        return distance, rows


@torch.no_grad()
def _read(
    model: nn.Module, cases: Sequence[Cases], readings: Sequence[Reading], config: RoutingConfig
) -> list[_Recording]:
    recalls = [_Recording(each, config) for each in cases]
    with freeze(model), install_hooks([RouterHook(each.cases.router, each) for each in recalls]):
        for reading in readings:
            for recall in recalls:
                recall.owner = reading.owner
            loss_of(model, reading.batch)
    return recalls


def rekeyed(
    model: nn.Module, cases: Sequence[Cases], readings: Sequence[Reading], config: RoutingConfig
) -> list[Cases]:
    """Keys as they are with the memory on. `readings` have every case."""
    rows = torch.cat([reading.rows for reading in readings])
    found = []
    for recall in _read(model, cases, readings, config):
        keys = recall.cases.keys.clone()
        kept = [
            part[reading.kept.to(part.device)]
            for part, reading in zip(recall.inputs, readings, strict=True)
        ]
        keys[rows.to(keys.device)] = torch.cat(kept)
        found.append(replace(recall.cases, keys=keys))
    return found


def searched(
    model: nn.Module, cases: Sequence[Cases], readings: Sequence[Reading], config: RoutingConfig
) -> Studied:
    """Neighbours of the inputs that the model has with the memory on."""
    recalls = _read(model, cases, readings, config)
    return Studied(readings, [Neighbours(recall.rows) for recall in recalls])
