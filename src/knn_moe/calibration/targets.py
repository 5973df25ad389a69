"""Choose how better logits are found, η, S and the gradient, on a sample of the reference set.

Every candidate optimises the same sample; the steps of one path are candidates too. Keys do not
depend on the candidate: neighbours are searched once, an example's own left out. What each
candidate's values are then worth, recalled as the strong preset would, is one forward pass each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.calibration.fit import Cases, Neighbours, Studied, mixing, recalled_loss
from knn_moe.calibration.kernels import Kernels
from knn_moe.calibration.result import Candidate
from knn_moe.calibration.slices import Reading
from knn_moe.config import GRADIENTS, PRESETS, BuildConfig, RoutingConfig
from knn_moe.errors import UnsupportedModelError
from knn_moe.index.others import nearest_others
from knn_moe.optimise import LayerCases, frozen, optimise_routing
from knn_moe.routers import Router, input_device

RATES: Final = (0.1, 0.5, 2.0, 5.0, 15.0)
STEPS: Final = (1, 5)
_RECALL: Final = PRESETS["strong"]["routing"]


@dataclass
class _Sample:
    """What was read and what each candidate made of it, by layer; padding left out."""

    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[tuple[Candidate, int], list[Tensor]] = field(default_factory=dict)

    def keep(self, candidate: Candidate, cases: dict[int, LayerCases], real: Tensor) -> None:
        for layer, case in cases.items():
            place = real.to(case.logits.device)
            self.values.setdefault((candidate, layer), []).append(case.logits[place])

    def keep_keys(self, cases: dict[int, LayerCases], real: Tensor) -> None:
        for layer, case in cases.items():
            place = real.to(case.inputs.device)
            self.keys.setdefault(layer, []).append(case.inputs[place])


def choose_targets(
    model: nn.Module,
    routers: list[Router],
    readings: Sequence[Reading],
    base: BuildConfig,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Candidate]:
    """Every candidate with its loss, the best first."""
    sample = _Sample()
    with frozen(model), torch.inference_mode(False):
        for place, reading in enumerate(readings):
            _try_all(model, routers, reading, base, sample)
            on_progress(place + 1, len(readings))
        owner = torch.cat([reading.owner[reading.owner != 0] for reading in readings])
        keys = {layer: torch.cat(parts) for layer, parts in sample.keys.items()}
        near = {layer: _near(keys[layer], owner) for layer in keys}
        judged = []
        for candidate in dict.fromkeys(candidate for candidate, _ in sample.values):
            cases = [
                Cases(
                    router,
                    keys[router.layer],
                    torch.cat(sample.values.pop((candidate, router.layer))),
                    owner,
                    near[router.layer].gamma,
                )
                for router in routers
            ]
            rows = [near[router.layer].rows for router in routers]
            judged.append(replace(candidate, loss=_loss(model, cases, rows, readings)))
    return sorted(judged, key=lambda candidate: candidate.loss)


def _try_all(
    model: nn.Module,
    routers: list[Router],
    reading: Reading,
    base: BuildConfig,
    sample: _Sample,
) -> None:
    """All paths of one batch."""
    batch, real = reading.batch.to(input_device(model)), reading.owner != 0
    first = True
    for gradient, rate in product(GRADIENTS, RATES):

        def keep(
            step: int, cases: dict[int, LayerCases], gradient: str = gradient, rate: float = rate
        ) -> None:
            if step in STEPS:
                sample.keep(Candidate(gradient, rate, step), cases, real)

        way = replace(base, gradient=gradient, learning_rate=rate, steps=max(STEPS))
        try:
            cases = optimise_routing(model, routers, batch, way, keep)
        except UnsupportedModelError:
            if gradient == "sparse":
                raise
            return  # a family whose experts cannot all be asked
        if first:
            sample.keep_keys(cases, real)
            first = False


@dataclass(frozen=True)
class _Near:
    rows: Tensor
    gamma: float


def _near(keys: Tensor, owner: Tensor) -> _Near:
    labels = [(owner.to(keys.device), owner.to(keys.device))]
    distance, rows = nearest_others(keys, keys, labels, _RECALL["k"], keys.device)
    nearest = distance[:, 0]
    typical = nearest[(nearest > 0) & nearest.isfinite()].double()
    return _Near(rows, float(1 / typical.mean()) if len(typical) else 1.0)


@torch.no_grad()
def _loss(
    model: nn.Module, cases: Sequence[Cases], rows: Sequence[Tensor], readings: Sequence[Reading]
) -> float:
    """A token's, with neighbours known beforehand."""
    gammas = {each.router.layer: each.gamma for each in cases}
    routing = RoutingConfig(**_RECALL)
    kernels = Kernels(gammas, cases[0].keys.device, [routing.kernel(layer) for layer in gammas])
    neighbours = [Neighbours(list(_spread(part, readings))) for part in rows]
    studied = Studied(readings, neighbours)
    total = tokens = 0.0
    with mixing(cases, kernels, routing.k) as mixes:
        for place in range(len(readings)):
            summed, count = recalled_loss(model, mixes, studied, place)
            total, tokens = total + float(summed), tokens + count
    return total / tokens


def _spread(rows: Tensor, readings: Sequence[Reading]) -> Iterator[Tensor]:
    """Rows of real tokens to where they are in each padded batch. Shapes: [n, K] → [B·T, K]."""
    start = 0
    for reading in readings:
        real = (reading.owner != 0).to(rows.device)
        count = int(real.sum())
        whole = rows.new_zeros(len(real), rows.shape[1])
        whole[real] = rows[start : start + count]
        start += count
        yield whole
