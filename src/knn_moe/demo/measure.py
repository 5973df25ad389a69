"""How good the model is on the test text, run in several ways, and whether a difference is real.

Knows the attached model and its statistics; nothing of how a result is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor

from knn_moe.demo.result import ExpertUse, Score, Tercile
from knn_moe.demo.texts import TestSet
from knn_moe.inference.attach import attach
from knn_moe.inference.expert_usage import count_experts
from knn_moe.inference.hooks import LayerStats
from knn_moe.memory.memory import RoutingMemory
from knn_moe.support.statistics import Comparison, paired_bootstrap
from knn_moe.tasks.likelihood import TokenLosses, continuation_scores, token_losses

_BATCH: Final = 8  # windows read together
_THIRDS: Final = ("easiest third", "middle third", "hardest third")

OnShare = Callable[[float], None]  # how much of the work is done, from 0 to 1


@dataclass(frozen=True)
class Measured:
    """One way of running the model, item by item. Shapes: chosen [C] bool; experts [layers,
    experts], the share of the windows' tokens each was chosen for."""

    way: str
    losses: TokenLosses
    chosen: Tensor
    experts: Tensor
    stats: dict[int, LayerStats] = field(default_factory=dict)


def measure_alone(model: Any, test: TestSet, on_share: OnShare) -> Measured:
    return _run(model, test, "zero-shot", on_share)


def measure_with(
    model: Any, memory: RoutingMemory, test: TestSet, way: str, on_share: OnShare
) -> Measured:
    """The same with a memory attached."""
    with attach(model, memory) as routing:
        return replace(_run(model, test, way, on_share), stats=routing.stats())


def _run(model: Any, test: TestSet, way: str, on_share: OnShare) -> Measured:
    read = test.windows.numel()
    to_read = read + test.contexts.numel() + test.continuations.numel()

    def after_windows(done: int) -> None:
        on_share(done * test.windows.shape[1] / to_read)

    def after_choices(done: int) -> None:
        on_share((read + done / len(test.contexts) * (to_read - read)) / to_read)

    with count_experts(model) as counts:
        losses = token_losses(model, test.windows, _BATCH, after_windows)
    scores = continuation_scores(
        model, test.contexts, test.continuations, 2 * _BATCH, after_choices
    )
    return Measured(way, losses, scores.argmax(dim=-1) == test.answers, counts.shares())


def score(measured: Measured, alone: Measured, *, control: bool = False) -> Score:
    """One row of the table, against the model alone."""
    stats = measured.stats.values()
    same = measured is alone
    return Score(
        way=measured.way,
        nll=float(measured.losses.nll.mean()),
        accuracy=float(measured.losses.correct.float().mean()),
        choice=float(measured.chosen.float().mean()),
        nll_change=None if same else _compare(measured.losses.nll, alone.losses.nll),
        accuracy_change=None if same else _compare(measured.losses.correct, alone.losses.correct),
        choice_change=None if same else _compare(measured.chosen, alone.chosen),
        confidence=tuple(layer.mean_confidence for layer in stats),
        rerouted=tuple(layer.changed or 0.0 for layer in stats),
        control=control,
    )


def _compare(first: Tensor, second: Tensor) -> Comparison:
    """Resampled by window or choice, the first dimension."""
    one, two = (x.float().view(len(x), -1).mean(dim=1).numpy() for x in (first, second))
    return paired_bootstrap(one, two)


def terciles(ways: Sequence[Measured], alone: Measured) -> tuple[Tercile, ...]:
    """The test windows in thirds, by the perplexity of the model alone (§5.2)."""
    by_window = alone.losses.nll.mean(dim=1)
    found = []
    for name, part in zip(_THIRDS, by_window.argsort().tensor_split(3), strict=True):
        if len(part):
            low, high = by_window[part].exp().aminmax()
            nll = {way.way: float(way.losses.nll[part].mean()) for way in ways}
            change = {
                way.way: _compare(way.losses.nll[part], alone.losses.nll[part])
                for way in ways
                if way is not alone
            }
            found.append(Tercile(name, (float(low), float(high)), nll, change))
    return tuple(found)


def expert_use(alone: Measured, routed: Measured) -> ExpertUse:
    return ExpertUse(_rows(alone.experts), _rows(routed.experts))


def _rows(table: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(share, 4) for share in row) for row in table.tolist())
