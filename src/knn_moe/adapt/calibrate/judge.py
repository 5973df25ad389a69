"""What a memory is worth on examples that nothing was fitted on; every search afresh, and exact.

A token recalls every example but its own: what is judged is the memory as it will be used, but for
one example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.fit import Cases, losses
from knn_moe.adapt.calibrate.splits import Reading
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.config import RoutingConfig
from knn_moe.equations.mixing import confidence, mix_logits, propose_logits
from knn_moe.recall.recall import layer_widths
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, install_hooks
from knn_moe.support.statistics import Comparison, paired_bootstrap


@dataclass(frozen=True)
class Judgement:
    """Losses a token on the same tokens, and the change with its interval, by example."""

    loss: float
    alone: float
    change: Comparison
    examples: int
    tokens: int
    mean_confidence: dict[int, float]  # λ by layer

    @property
    def better(self) -> bool:
        """Than the model alone, beyond chance."""
        return self.change.significant and self.change.difference < 0


class Recall:
    """A layer's recall as routing will have it, but for the token's own example."""

    def __init__(self, cases: Cases, config: RoutingConfig) -> None:
        # A γ that is given is one for all.
        self.cases = cases if config.gamma is None else replace(cases, ratio=None)
        self.k = config.k
        self.widths = layer_widths(cases.gamma, cases.router.layer, config)
        self.owner = torch.empty(0)
        self.total = self.tokens = 0.0

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        distance, rows = self.nearest(inputs)
        proposal = propose_logits(self.cases.values[rows], -self.widths.gamma * distance)
        confidence_factor = self.widths.confidence_factor * confidence(
            -self.widths.confidence_gamma * distance
        )
        real = (self.owner != 0).to(confidence_factor.device)
        self.total += float(confidence_factor[real].sum())
        self.tokens += int(real.sum())
        return mix_logits(logits.float(), proposal, confidence_factor).to(logits.dtype)

    def nearest(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances and rows [T, K]."""
        return self.cases.nearest(inputs, self.owner, self.k)


@dataclass(frozen=True)
class Baseline:
    """Readings, and what the model alone loses on each line of them, over how many tokens."""

    readings: Sequence[Reading]
    alone: list[Tensor]
    tokens: list[Tensor]

    @staticmethod
    @torch.no_grad()
    def of(model: nn.Module, readings: Sequence[Reading]) -> Baseline:
        with freeze(model):
            lines = [losses(model, reading.batch) for reading in readings]
        return Baseline(readings, [summed for summed, _ in lines], [count for _, count in lines])


@torch.no_grad()
def judge(
    model: nn.Module,
    cases: Sequence[Cases],
    baseline: Baseline,
    config: RoutingConfig,
    on_step: Callable[[], None] = lambda: None,
) -> Judgement:
    """The model with the memory, as `config` says, against the model alone.

    Raises DivergedError where the memory leads the model to losses that are no numbers.
    """
    recalls = [
        Recall(each, config)
        for each in cases
        if config.for_layer(each.router.layer).confidence_factor > 0
    ]
    hooks = [RouterHook(recall.cases.router, recall) for recall in recalls]
    mixed = []
    with freeze(model), install_hooks(hooks):
        for reading in baseline.readings:
            for recall in recalls:
                recall.owner = reading.owner
            mixed.append(losses(model, reading.batch)[0])
            on_step()
    if not all(bool(part.isfinite().all()) for part in mixed):
        raise DivergedError
    without, with_it, tokens = _by_example(baseline, [baseline.alone, mixed, baseline.tokens])
    change = _compare(with_it, without, tokens)
    total = float(tokens.sum())
    return Judgement(
        loss=float(with_it.sum()) / total,
        alone=float(without.sum()) / total,
        change=change,
        examples=len(tokens),
        tokens=int(total),
        mean_confidence={
            recall.cases.router.layer: recall.total / max(recall.tokens, 1) for recall in recalls
        },
    )


def compare_by_example(baseline: Baseline, with_it: Tensor, without: Tensor) -> Comparison:
    """The change of the loss a token. Shapes: with_it, without [lines], summed over a line."""
    columns = _by_example(baseline, [[with_it], [without], baseline.tokens])
    return _compare(*columns)


def _compare(with_it: Tensor, without: Tensor, tokens: Tensor) -> Comparison:
    """Shapes: [examples] each, summed losses and tokens."""
    return paired_bootstrap(
        (with_it / tokens).numpy(), (without / tokens).numpy(), weights=tokens.numpy()
    )


def _by_example(baseline: Baseline, columns: list[list[Tensor]]) -> list[Tensor]:
    """Sums over each example's lines; examples of no tokens, the last column, are left out."""
    examples = torch.cat([reading.example for reading in baseline.readings])
    _, place = examples.unique(return_inverse=True)
    size = int(place.max()) + 1
    sums = [
        torch.zeros(size, dtype=torch.float64).index_add(0, place, torch.cat(column).double())
        for column in columns
    ]
    return [column[sums[-1] > 0] for column in sums]
