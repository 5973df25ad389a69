"""Choose how better logits are found (η, S and the gradient) on a sample of the reference set.

Every candidate optimises the same sample; the steps of one path are candidates too, and paths of
several η share their first backward pass. Keys do not depend on the candidate, so neighbours are
looked up once. A candidate's values are then recalled as the strong preset would, with several
confidence factors: neighbours in a sample are farther than those in the whole set will be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.fit import (
    FitCases,
    FitData,
    NeighbourTable,
    install_fitted_recall,
    mean_loss,
)
from knn_moe.adapt.calibrate.result import Candidate
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.build.optimise import Layers, optimise_paths
from knn_moe.config import PRESETS, BuildConfig, RoutingConfig
from knn_moe.errors import CalibrationError, UnsupportedModelError
from knn_moe.reference.windows import Batch
from knn_moe.routers.find import Router
from knn_moe.routers.model_state import freeze, input_device
from knn_moe.support.progress import OnProgress, Progress, ignore_progress

RATES: Final = (0.1, 1.0, 5.0)  # η; what lies between is reached by rescaling (widths.py)
SPARSE_RATE: Final = 1.0  # where there are dense gradients too
STEPS: Final = (1, 5)
CONFIDENCE_FACTORS: Final = (0.25, 1.0)
_ENOUGH: Final = 0.5  # share of the best gain at which a dense candidate is preferred
_RECALL: Final = PRESETS["strong"]["routing"]


@dataclass
class _Sample:
    """What each candidate made of the sample, by layer: inputs of all tokens [B·T, d] of a batch,
    and values of those that are cases, on the CPU."""

    inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[tuple[Candidate, int], list[Tensor]] = field(default_factory=dict)

    def keep(self, candidate: Candidate, layers: Layers, kept: Tensor) -> None:
        for layer, found in layers.items():
            place = kept.to(found.logits.device)
            self.values.setdefault((candidate, layer), []).append(found.logits[place].cpu())

    def keep_inputs(self, layers: Layers) -> None:
        for layer, found in layers.items():
            self.inputs.setdefault(layer, []).append(found.inputs)


def choose_targets(
    model: nn.Module,
    routers: list[Router],
    batches: Sequence[Batch],
    base: BuildConfig,
    *,
    values_trained: bool = True,
    on_progress: OnProgress = ignore_progress,
) -> list[Candidate]:
    """Return every candidate with its loss, the one to take first. Diverging ones are left out.

    Args:
        model: The model alone.
        routers: Its routers.
        batches: The sample.
        base: What a candidate does not choose.
        values_trained: Whether values will be trained afterwards.
        on_progress: Called after each batch.

    Raises:
        CalibrationError: No candidate gives a finite loss.
    """
    sample = _Sample()
    judged, alone = [], None
    with freeze(model), torch.inference_mode(False):
        for done, batch in enumerate(batches, start=1):
            _try_all(model, routers, batch, base, sample)
            on_progress(Progress("trying η, S and the gradient", done, len(batches)))
        layers = [_look_up(router, sample.inputs.pop(router.layer), batches) for router in routers]
        data = FitData(batches, [layer.table for layer in layers])
        for candidate in dict.fromkeys(candidate for candidate, _ in sample.values):
            cases = [_with_values(layer.cases, sample, candidate) for layer in layers]
            losses = [_loss(model, cases, data, factor) for factor in CONFIDENCE_FACTORS]
            alone = _loss(model, cases, data, 0.0) if alone is None else alone
            loss = min(filter(math.isfinite, losses), default=math.inf)
            judged.append(replace(candidate, loss=loss))
    finite = [candidate for candidate in judged if math.isfinite(candidate.loss)]
    if not finite:
        raise CalibrationError(
            f"No η from {min(RATES)} on gave the model a finite loss: it may overflow in its "
            f"dtype. Try another dtype, or a preset."
        )
    return rank_candidates(finite, alone if values_trained else None)


def rank_candidates(candidates: Sequence[Candidate], alone: float | None) -> list[Candidate]:
    """Sort candidates by loss, the one to take first.

    Where values will be trained, and the model `alone` has that loss, the best dense candidate goes
    first if it has half of the best one's gain: values are trained by the gradient of the build
    (values.py), and through all experts they learn more.
    """
    best, *others = sorted(candidates, key=lambda each: each.loss)
    if alone is None or best.gradient == "dense":
        return [best, *others]
    enough = alone - _ENOUGH * max(alone - best.loss, 0.0)
    dense = (each for each in others if each.gradient == "dense")
    taken = next((each for each in dense if each.loss < enough), best)
    return [taken, *(each for each in (best, *others) if each is not taken)]


def _try_all(
    model: nn.Module, routers: list[Router], batch: Batch, base: BuildConfig, sample: _Sample
) -> None:
    """Optimise one batch along all paths: dense ones of every rate, and a sparse one, which may be
    rescaled as the dense are. Where the experts cannot all be run, sparse ones of every rate."""
    kept, moved = batch.kept.flatten(), batch.to(input_device(model))

    def optimise(gradient: str, rates: Sequence[float]) -> Layers:
        def keep(rate: float, step: int, layers: Layers) -> None:
            if step in STEPS:
                sample.keep(Candidate(gradient, rate, step), layers, kept)

        config = replace(base, gradient=gradient, steps=max(STEPS))
        return optimise_paths(model, routers, moved, config, rates, keep)

    try:
        layers = optimise("dense", RATES)
    except UnsupportedModelError:
        layers = optimise("sparse", RATES)
    else:
        optimise("sparse", [SPARSE_RATE])
    sample.keep_inputs(layers)


class _SampleLayer(NamedTuple):
    """One layer's keys, without values, and each token's neighbours among them."""

    cases: FitCases
    table: NeighbourTable


def _look_up(router: Router, inputs: list[Tensor], batches: Sequence[Batch]) -> _SampleLayer:
    device = inputs[0].device
    kept = [batch.kept.flatten().to(device) for batch in batches]
    keys = torch.cat([part[place] for part, place in zip(inputs, kept, strict=True)])
    owner = torch.cat([batch.token_owner[batch.kept.flatten()] for batch in batches]).to(device)
    cases = FitCases(router, keys, torch.empty(0), owner, gamma=1.0)
    table, nearest = NeighbourTable(), []
    for part, batch, place in zip(inputs, batches, kept, strict=True):
        near = cases.nearest(part, batch.token_owner, _RECALL["k"])
        table.rows.append(near.rows)
        nearest.append(near.squared_distance[place, 0])
    typical = torch.cat(nearest).double()
    typical = typical[(typical > 0) & typical.isfinite()]
    gamma = float(1 / typical.mean()) if len(typical) else 1.0
    return _SampleLayer(replace(cases, gamma=gamma), table)


def _with_values(cases: FitCases, sample: _Sample, candidate: Candidate) -> FitCases:
    values = torch.cat(sample.values.pop((candidate, cases.router.layer)))
    return replace(cases, values=values.to(cases.keys.device))


@torch.no_grad()
def _loss(model: nn.Module, cases: Sequence[FitCases], data: FitData, factor: float) -> float:
    """Return the loss per token with known neighbours."""
    gammas = {each.router.layer: each.gamma for each in cases}
    routing = RoutingConfig(**_RECALL, confidence_factor=factor)
    start = [routing.for_layer(layer) for layer in gammas]
    parameters = WidthParameters(gammas, cases[0].keys.device, start)
    total = tokens = 0.0
    with install_fitted_recall(cases, parameters, routing.k) as recalls:
        for place, batch in enumerate(data.batches):
            count = int(batch.scored.sum())
            total += count * float(mean_loss(model, recalls, data, place))
            tokens += count
    return total / tokens
