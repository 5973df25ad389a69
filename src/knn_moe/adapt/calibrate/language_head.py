"""Choose a memory's head: how many cases tell what followed, how near they must be, and how much
weight they have beside the model with its memory on. Chosen by the examples to choose by, judged by
those to judge by; a token recalls every example but its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knn_moe.adapt.calibrate.fit import Cases, next_logits
from knn_moe.adapt.calibrate.judge import Baseline, Recall, compare_by_example
from knn_moe.adapt.calibrate.splits import Reading
from knn_moe.config import HeadConfig, RoutingConfig
from knn_moe.equations.next_token import mix_likelihoods
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, install_hooks
from knn_moe.support.statistics import Comparison

KS: Final = (16, 64)
SCALES: Final = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0)  # of γ: 1 / T, in terms of the usual d²


@dataclass(frozen=True)
class HeadFound:
    """A head, and the change of the loss a token on the examples to judge by."""

    config: HeadConfig
    change: Comparison  # with memory and head, against the model alone
    added: Comparison  # against the model with its memory, without the head

    @property
    def helps(self) -> bool:
        """Beyond what the memory does, and beyond chance."""
        return self.added.significant and self.added.difference < 0


class Told(NamedTuple):
    """Of T tokens with a next one: its log p by the model with its memory [T]; γ d² of the nearest
    cases [T, K], inf where nothing followed; whether the same followed [T, K]; the line they are
    in [T], of all lines."""

    own: Tensor
    distance: Tensor
    right: Tensor
    line: Tensor

    def losses(self, config: HeadConfig) -> Tensor:
        """Of each token, with a head. Shape [T]."""
        near = self.distance[:, : config.k], self.right[:, : config.k]
        (_, found), *_ = mix_likelihoods(self.own, *near, 1 / config.gamma_scale, [config.weight])
        return -found


class _Listening(Recall):
    """Finds more cases than routing takes, and keeps them."""

    def __init__(self, cases: Cases, config: RoutingConfig) -> None:
        super().__init__(cases, config)
        self.found = torch.empty(0), torch.empty(0)

    def nearest(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        self.found = self.cases.nearest(inputs, self.owner, max(self.k, KS[-1]))
        return self.found[0][:, : self.k], self.found[1][:, : self.k]


def choose_head(
    model: nn.Module,
    cases: Sequence[Cases],
    following: Tensor,
    routing: RoutingConfig,
    parts: tuple[Baseline, Baseline],
) -> HeadFound:
    """The likeliest head on the first part, and what it is worth on the second. Shapes: following
    [M] int64, the token after each case's own, or -1."""
    choosing, judging = parts
    told = tell(model, cases, following, routing, choosing.readings)
    config = likeliest(told)
    told = tell(model, cases, following, routing, judging.readings)
    lines = sum(len(reading.example) for reading in judging.readings)
    with_head, without = (
        torch.zeros(lines, dtype=torch.float64).index_add(0, told.line, losses.double())
        for losses in (told.losses(config), -told.own)
    )
    alone = torch.cat(judging.alone)
    return HeadFound(
        config,
        change=compare_by_example(judging, with_head, alone),
        added=compare_by_example(judging, with_head, without),
    )


def likeliest(told: Told) -> HeadConfig:
    """One search serves every setting that is tried."""
    tried = []
    for k, scale in product(KS, SCALES):
        near = told.distance[:, :k], told.right[:, :k]
        for weight, found in mix_likelihoods(told.own, *near, 1 / scale):
            tried.append((-float(found.double().mean()), k, scale, weight))
    _, k, scale, weight = min(tried)
    return HeadConfig(k=k, gamma_scale=scale, weight=weight)


@torch.no_grad()
def tell(
    model: nn.Module,
    cases: Sequence[Cases],
    following: Tensor,
    routing: RoutingConfig,
    readings: Sequence[Reading],
) -> Told:
    """What the model with its memory makes of the readings, and what the last layer finds."""
    asked = [each for each in cases if routing.for_layer(each.router.layer).confidence_factor > 0]
    *others, last = sorted(asked, key=lambda each: each.router.layer)
    listening = _Listening(last, routing)
    gamma = routing.gamma or last.gamma  # as head.py has it
    recalls = [*(Recall(each, routing) for each in others), listening]
    following = following.to(last.keys.device)
    parts, lines = [], 0
    with freeze(model), install_hooks([RouterHook(each.cases.router, each) for each in recalls]):
        for reading in readings:
            for recall in recalls:
                recall.owner = reading.owner
            logits, targets = next_logits(model, reading.batch)
            found = _told(logits, targets, listening.found, following)
            parts.append(found._replace(distance=gamma * found.distance, line=found.line + lines))
            lines += len(reading.example)
    return Told(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _told(logits: Tensor, targets: Tensor, found: tuple[Tensor, Tensor], following: Tensor) -> Told:
    """Of one reading, on the CPU, with d² as it was found. Shapes: logits [B, T - 1, V]; targets
    [B, T - 1]; found [B·T, K] twice."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    scored = targets != -100
    line = torch.arange(len(targets), device=targets.device)[:, None].expand_as(targets)
    distance, rows = (
        part.view(len(targets), -1, part.shape[-1])[:, :-1][scored.to(part.device)]
        for part in found
    )
    after = following[rows]
    distance = distance.masked_fill(after < 0, float("inf"))
    right = after == targets[scored].to(after.device)[:, None]
    parts = -loss[scored.flatten()], distance, right, line[scored]
    return Told(*(part.cpu() for part in parts))
