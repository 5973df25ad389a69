"""Judge a memory on examples that nothing was fitted on; every search is done again, and exact.

A token recalls every example but its own: what is judged is the memory as it will be used, but for
one example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.objective import line_losses
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.config import RoutingConfig
from knn_moe.recall.leave_one_out import Cases, LeaveOneOutRecall
from knn_moe.recall.neighbours import Recalled
from knn_moe.reference.windows import Batch
from knn_moe.routers.find import Router
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, install_hooks
from knn_moe.support.statistics import Comparison, paired_bootstrap

_LEVEL: Final = 0.05


@dataclass(frozen=True)
class Judgement:
    """The loss per token with the memory and without it, and the change with its interval."""

    loss: float
    alone: float
    change: Comparison
    examples: int
    tokens: int
    mean_confidence: dict[int, float]  # λ by layer
    looks: int = 1  # 2: it was not sure at the first look, and was judged on more examples

    @property
    def better(self) -> bool:
        """Whether the memory is significantly better than the model alone: p < 0.05 / looks."""
        sure = self.change.surely_less(self.examples)
        return sure and self.change.p < _LEVEL / self.looks


class Judged(Protocol):
    """What one layer recalls, as a router callback that also tells the mean λ."""

    @property
    def router(self) -> Router: ...

    @property
    def mean_confidence(self) -> float: ...

    def begin(self, batch: Batch) -> None: ...

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor: ...


class ConfidenceSum:
    """The mean λ of the tokens that are not left to the router."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._tokens = 0

    def add(self, confidence: Tensor, batch: Batch, *, spare_first: bool) -> None:
        """Add the tokens of a batch. Shapes: confidence [B·T]."""
        counted = batch.token_owner != 0
        if spare_first:
            counted &= ~batch.first_tokens
        self._sum += float(confidence[counted.to(confidence.device)].sum())
        self._tokens += int(counted.sum())

    @property
    def mean(self) -> float:
        return self._sum / max(self._tokens, 1)


class JudgedRecall(LeaveOneOutRecall):
    """A layer's recall of other examples as `config` has it, which also sums up λ."""

    def __init__(self, cases: Cases, config: RoutingConfig) -> None:
        super().__init__(cases, config)
        self.router = cases.router
        self.confidence = ConfidenceSum()

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.batch = batch

    def recall(self, inputs: Tensor) -> Recalled:
        recalled = super().recall(inputs)
        self.confidence.add(recalled.confidence, self.batch, spare_first=self.spares_first)
        return recalled

    @property
    def mean_confidence(self) -> float:
        return self.confidence.mean


@dataclass(frozen=True)
class Baseline:
    """Batches to judge by, and the model alone on them: each line's loss, and the tokens (or
    choices) that it counts for.

    Shapes: losses, tokens [lines] fp64, over all batches.
    """

    batches: Sequence[Batch]
    losses: Tensor
    tokens: Tensor

    @staticmethod
    @torch.no_grad()
    def of(model: nn.Module, batches: Sequence[Batch]) -> Baseline:
        """Run the model alone."""
        with freeze(model):
            losses = [line_losses(model, batch).cpu() for batch in batches]
        tokens = [batch.counts.double() for batch in batches]
        return Baseline(batches, torch.cat(losses), torch.cat(tokens))

    @staticmethod
    def join(parts: Sequence[Baseline]) -> Baseline:
        """Return the parts, which have no example in common, as one."""
        return Baseline(
            [batch for part in parts for batch in part.batches],
            torch.cat([part.losses for part in parts]),
            torch.cat([part.tokens for part in parts]),
        )

    @property
    def examples(self) -> int:
        """The number of examples that have a scored token."""
        return len(self.sum_by_example(self.tokens)[0])

    def compare(self, losses: Tensor, against: Tensor) -> Comparison:
        """Compare losses per token, example by example. Shapes: [lines], summed over a line."""
        ours, theirs, tokens = self.sum_by_example(losses, against, self.tokens)
        return paired_bootstrap(
            (ours / tokens).numpy(), (theirs / tokens).numpy(), weights=tokens.numpy()
        )

    def sum_by_example(self, *columns: Tensor) -> list[Tensor]:
        """Sum columns [lines] over each example's lines; leave out examples without tokens."""
        _, place = torch.cat([batch.owner for batch in self.batches]).unique(return_inverse=True)
        size = int(place.max()) + 1
        sums = [
            torch.zeros(size, dtype=torch.float64).index_add(0, place, column.double())
            for column in (*columns, self.tokens)
        ]
        return [column[sums[-1] > 0] for column in sums[:-1]]


class Reading(NamedTuple):
    """What a model that recalls has read: each line's loss [lines], and the mean λ by layer."""

    losses: Tensor
    mean_confidence: dict[int, float]

    @staticmethod
    def join(parts: Sequence[Reading], tokens: Sequence[int]) -> Reading:
        """Return several readings, of so many tokens each, as one."""
        layers = parts[0].mean_confidence
        mean = {
            layer: sum(
                part.mean_confidence.get(layer, 0.0) * count
                for part, count in zip(parts, tokens, strict=True)
            )
            / sum(tokens)
            for layer in layers
        }
        return Reading(torch.cat([part.losses for part in parts]), mean)


def judge(
    model: nn.Module, cases: Sequence[Cases], baseline: Baseline, config: RoutingConfig
) -> Judgement:
    """Compare the model with the memory, used as `config` says, with the model alone.

    Raises:
        DivergedError: The losses are not finite.
    """
    return compare(read_recalling(model, cases, baseline, config), baseline)


def read_recalling(
    model: nn.Module, cases: Sequence[Cases], baseline: Baseline, config: RoutingConfig
) -> Reading:
    """Read the batches of `baseline` with the memory, used as `config` says."""
    used = [each for each in cases if config.for_layer(each.router.layer).confidence_factor > 0]
    return read_batches(model, [JudgedRecall(each, config) for each in used], baseline)


@torch.no_grad()
def read_batches(model: nn.Module, recalls: Sequence[Judged], baseline: Baseline) -> Reading:
    """Read the batches of `baseline` with what the layers recall."""
    lines = []
    with freeze(model), install_hooks([RouterHook(each.router, each) for each in recalls]):
        for batch in baseline.batches:
            for recall in recalls:
                recall.begin(batch)
            lines.append(line_losses(model, batch).cpu())
    confidence = {recall.router.layer: recall.mean_confidence for recall in recalls}
    return Reading(torch.cat(lines), confidence)


def compare(reading: Reading, baseline: Baseline, looks: int = 1) -> Judgement:
    """Compare what was read with the model alone.

    Raises:
        DivergedError: The losses are not finite.
    """
    if not bool(reading.losses.isfinite().all()):
        raise DivergedError
    ours, theirs, tokens = baseline.sum_by_example(reading.losses, baseline.losses, baseline.tokens)
    total = float(tokens.sum())
    return Judgement(
        loss=float(ours.sum()) / total,
        alone=float(theirs.sum()) / total,
        change=baseline.compare(reading.losses, baseline.losses),
        examples=len(tokens),
        tokens=int(total),
        mean_confidence=reading.mean_confidence,
        looks=looks,
    )
