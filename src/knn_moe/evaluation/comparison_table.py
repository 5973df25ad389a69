"""A comparison of runs as a small table, for a notebook and for `print`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from knn_moe.pages.words import (
    NATS,
    NATS_CHANGE,
    NONE,
    POINTS,
    SHARE,
    Unit,
    format_interval,
    format_p,
)
from knn_moe.support.statistics import Comparison
from knn_moe.support.summary_table import SummaryTable

if TYPE_CHECKING:
    from knn_moe.evaluation.compare import Line

_COLUMNS: Final = (
    "task", "method", "items", "score", "change of score", "loss", "change of loss",
)  # fmt: skip


def comparison_table(lines: Sequence[Line], against: str, doubts: Sequence[str]) -> SummaryTable:
    """Return a row for each line; `doubts` are sentences on changes that are not judged."""
    tested = {line.task for line in lines if line.adjusted_p is not None}
    holm = f"The p of a task's score is corrected for {len(tested)} tasks (Holm)."
    return SummaryTable(
        title=f"Changes against {against}, with 95 % intervals; losses in nats per token",
        columns=_COLUMNS,
        rows=[_row(line) for line in lines],
        texts=2,
        notes=[holm, *doubts] if len(tested) > 1 else doubts,
    )


def _row(line: Line) -> tuple[str, ...]:
    adjusted = line.adjusted_p
    return (
        line.task,
        line.method,
        f"{line.items:,}",
        SHARE.format(line.score.mean),
        _change(line.change, POINTS, None if line.change is None else adjusted),
        NATS.format(line.nll),
        _change(line.nll_change, NATS_CHANGE),
    )


def _change(change: Comparison | None, unit: Unit, adjusted: float | None = None) -> str:
    if change is None:
        return NONE
    p = change.p if adjusted is None else adjusted
    verdict = "not judged" if change.doubt is not None else format_p(p)
    interval = format_interval(change.low, change.high, unit)
    return f"{unit.format(change.difference)} ({interval}), {verdict}"
