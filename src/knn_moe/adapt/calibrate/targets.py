"""Choose how better logits are found, η, S and the gradient, on a sample of the reference set.

Every candidate optimises the same sample; the steps of one path are candidates too, and paths of
several η have their first backward pass in common. Keys do not depend on the candidate: neighbours
are searched once, an example's own left out. What each candidate's values are then worth, recalled
as the strong preset would, is a forward pass for each confidence factor: neighbours in a sample
are farther than those in the whole set will be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.fit import Cases, Neighbours, Studied, mixing, recalled_loss
from knn_moe.adapt.calibrate.result import Candidate
from knn_moe.adapt.calibrate.splits import Reading
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.build.optimise import LayerCases, optimise_paths
from knn_moe.config import PRESETS, BuildConfig, RoutingConfig
from knn_moe.errors import CalibrationError, UnsupportedModelError
from knn_moe.routers.find import Router
from knn_moe.routers.model_state import freeze, input_device

RATES: Final = (0.1, 1.0, 5.0)  # and what lies between by rescaling (widths.py)
SPARSE_RATE: Final = 1.0  # where there are dense ones too
STEPS: Final = (1, 5)
CONFIDENCE_FACTORS: Final = (0.25, 1.0)
_NO: Final = math.inf
_ENOUGH: Final = 0.5  # of the best one's gain, for a dense one to be taken
_RECALL: Final = PRESETS["strong"]["routing"]


@dataclass
class _Sample:
    """What was read and what each candidate made of it, by layer: inputs of all tokens [B·T, d] of
    each reading; values of those that are cases, on the CPU."""

    inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[tuple[Candidate, int], list[Tensor]] = field(default_factory=dict)

    def keep(self, candidate: Candidate, cases: dict[int, LayerCases], kept: Tensor) -> None:
        for layer, case in cases.items():
            place = kept.to(case.logits.device)
            self.values.setdefault((candidate, layer), []).append(case.logits[place].cpu())

    def keep_inputs(self, cases: dict[int, LayerCases]) -> None:
        for layer, case in cases.items():
            self.inputs.setdefault(layer, []).append(case.inputs)


def choose_targets(
    model: nn.Module,
    routers: list[Router],
    readings: Sequence[Reading],
    base: BuildConfig,
    *,
    learning: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Candidate]:
    """Every candidate with its loss, the one to take first; what leads nowhere is left out.
    `learning`: whether values will learn afterwards."""
    sample = _Sample()
    with freeze(model), torch.inference_mode(False):
        for place, reading in enumerate(readings):
            _try_all(model, routers, reading, base, sample)
            on_progress(place + 1, len(readings))
        near = [_near(router, sample.inputs.pop(router.layer), readings) for router in routers]
        judged, alone = [], None
        for candidate in dict.fromkeys(candidate for candidate, _ in sample.values):
            cases = [
                replace(
                    each.cases,
                    values=torch.cat(sample.values.pop((candidate, each.cases.router.layer))).to(
                        each.cases.keys.device
                    ),
                )
                for each in near
            ]
            studied = Studied(readings, [each.neighbours for each in near])
            losses = [
                _loss(model, cases, studied, confidence_factor)
                for confidence_factor in CONFIDENCE_FACTORS
            ]
            alone = _loss(model, cases, studied, confidence_factor=0.0) if alone is None else alone
            judged.append(replace(candidate, loss=min(filter(math.isfinite, losses), default=_NO)))
    finite = [candidate for candidate in judged if math.isfinite(candidate.loss)]
    if not finite:
        raise CalibrationError(
            "No way to find better logits gave the model a finite loss, from η = "
            f"{min(RATES)} on: it may overflow in its dtype. Try another, or a preset."
        )
    return ranked(finite, alone if learning else None)


def ranked(candidates: Sequence[Candidate], alone: float | None) -> list[Candidate]:
    """By loss. Where values will learn, and the model `alone` loses as much, the best dense one
    goes first if it has half of the best one's gain: values learn by the build's gradient
    (values.py), and through all experts they learn more."""
    best, *others = sorted(candidates, key=lambda each: each.loss)
    if alone is None or best.gradient == "dense":
        return [best, *others]
    enough = alone - _ENOUGH * max(alone - best.loss, 0.0)
    dense = (each for each in others if each.gradient == "dense")
    taken = next((each for each in dense if each.loss < enough), best)
    return [taken, *(each for each in (best, *others) if each is not taken)]


def _try_all(
    model: nn.Module,
    routers: list[Router],
    reading: Reading,
    base: BuildConfig,
    sample: _Sample,
) -> None:
    """All paths of one batch: dense ones of every rate, and a sparse one, which may be rescaled as
    the dense are. Of a family whose experts cannot all be asked, sparse ones of every rate."""
    batch = reading.batch.to(input_device(model))

    def take(gradient: str, rates: Sequence[float]) -> dict[int, LayerCases]:
        def keep(rate: float, step: int, cases: dict[int, LayerCases]) -> None:
            if step in STEPS:
                sample.keep(Candidate(gradient, rate, step), cases, reading.kept)

        way = replace(base, gradient=gradient, steps=max(STEPS))
        return optimise_paths(model, routers, batch, way, rates, keep)

    try:
        cases = take("dense", RATES)
    except UnsupportedModelError:
        cases = take("sparse", RATES)
    else:
        take("sparse", [SPARSE_RATE])
    sample.keep_inputs(cases)


class _Near(NamedTuple):
    """One layer's keys, with no values yet, and each token's neighbours among them."""

    cases: Cases
    neighbours: Neighbours


def _near(router: Router, inputs: list[Tensor], readings: Sequence[Reading]) -> _Near:
    device = inputs[0].device
    kept = [reading.kept.to(device) for reading in readings]
    keys = torch.cat([part[place] for part, place in zip(inputs, kept, strict=True)])
    owner = torch.cat([reading.owner[reading.kept] for reading in readings]).to(device)
    cases = Cases(router, keys, torch.empty(0), owner, gamma=1.0)
    neighbours, nearest = Neighbours(), []
    for part, reading in zip(inputs, readings, strict=True):
        distance, rows = cases.nearest(part, reading.owner, _RECALL["k"])
        neighbours.rows.append(rows)
        nearest.append(distance[reading.kept.to(device), 0])
    typical = torch.cat(nearest).double()
    typical = typical[(typical > 0) & typical.isfinite()]
    gamma = float(1 / typical.mean()) if len(typical) else 1.0
    return _Near(replace(cases, gamma=gamma), neighbours)


@torch.no_grad()
def _loss(
    model: nn.Module, cases: Sequence[Cases], studied: Studied, confidence_factor: float
) -> float:
    """A token's, with neighbours known beforehand."""
    gammas = {each.router.layer: each.gamma for each in cases}
    routing = RoutingConfig(**_RECALL, confidence_factor=confidence_factor)
    widths = WidthParameters(
        gammas, cases[0].keys.device, [routing.for_layer(layer) for layer in gammas]
    )
    total = tokens = 0.0
    with mixing(cases, widths, routing.k) as mixes:
        for place in range(len(studied.readings)):
            summed, count = recalled_loss(model, mixes, studied, place)
            total, tokens = total + float(summed), tokens + count
    return total / tokens
