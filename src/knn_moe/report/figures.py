"""What the charts of a report show, as JSON for the script that draws them.

Knows compared lines and runs; nothing of colours or geometry. What is not finite or not judged is
not drawn; the tables have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from knn_moe.evaluation.compare import TERCILES, Line
from knn_moe.evaluation.store import Run
from knn_moe.pages.words import NATS_CHANGE, PLAIN, POINTS, SHARE, Unit
from knn_moe.report.tables import CONFIDENCE, REROUTED
from knn_moe.support.statistics import Comparison
from knn_moe.tasks.task import TEXT

Interval: TypeAlias = tuple[float, float, float]  # a value, and from where to where it may lie
Figure: TypeAlias = dict[str, Any]


def score_figures(lines: Sequence[Line], methods: Sequence[str]) -> Iterator[Figure]:
    """Yield points with intervals: scores, their changes, and those of losses of text."""
    tasks = list(dict.fromkeys(line.task for line in lines))

    def draw(
        caption: str, value_of: Callable[[Line], Interval | None], unit: Unit, **more: Any
    ) -> Iterator[Figure]:
        groups = []
        for task in tasks:
            own = [line for line in lines if line.task == task]
            rows = [_point(methods.index(x.method), x.method, value_of(x), unit) for x in own]
            chance = next((line.chance for line in own if line.chance is not None), None)
            scaled = None if chance is None else round(chance * unit.scale, 4)
            groups.append(
                {"title": task, "chance": scaled if more.get("chance") else None,
                 "rows": [row for row in rows if row]}
            )  # fmt: skip
        yield from _points(caption, groups, unit, headings=len(tasks) > 1)

    yield from draw("Score, in per cent", lambda x: _finite(*_score(x)), SHARE, chance=True)
    yield from draw(
        "Change of the score, in percentage points", lambda x: _judged(x.change), POINTS
    )
    yield from draw(
        "Change of the loss, in nats per token of text: lower is better",
        lambda x: _judged(x.nll_change) if x.scoring == TEXT else None,
        NATS_CHANGE,
    )


def third_figures(lines: Sequence[Line], methods: Sequence[str]) -> Iterator[Figure]:
    """Yield for each task the change of the score by how surprising the model finds the text."""
    for task in dict.fromkeys(line.task for line in lines if line.by_perplexity):
        own = [line for line in lines if line.task == task and line.by_perplexity]
        groups = []
        for third in TERCILES:
            changes = [(line.method, (line.by_perplexity or {})[third]) for line in own]
            rows = [
                _point(methods.index(method), method, _judged(change), POINTS)
                for method, change in changes
            ]
            rows = [row for row in rows if row]
            groups.append({"title": f"{third} perplexity", "chance": None, "rows": rows})
        caption = f"{task}: change of the score, in percentage points"
        yield from _points(caption, groups, POINTS, headings=True)


def layer_figures(runs: Sequence[Run], methods: Sequence[str]) -> Iterator[Figure]:
    """Yield for each task a line for each method of what its memory did, layer by layer."""
    tasks = dict.fromkeys(run.task for run in runs if run.facts.get("routing"))
    for task in tasks:
        for caption, name, unit in (
            ("Mean confidence (λ) by layer", CONFIDENCE, PLAIN),
            ("Share of tokens rerouted by layer, in per cent", REROUTED, SHARE),
        ):
            known = [
                (run.method, run.facts.get("routing", {}).get(name, {}))
                for run in runs
                if run.task == task
            ]
            lines = [_line(methods.index(method), method, values, unit) for method, values in known]
            lines = [line for line in lines if line["points"]]
            if lines:
                whole = caption if len(tasks) == 1 else f"{task}: {caption}"
                yield {"kind": "lines", "caption": whole, "lines": lines}


def _points(
    caption: str, groups: Sequence[Figure], unit: Unit, *, headings: bool
) -> Iterator[Figure]:
    """Yield a figure of the groups that have rows, if there is one."""
    groups = [group for group in groups if group["rows"]]
    known: Figure = {"kind": "points", "caption": caption, "groups": groups}
    if groups:
        yield {**known, "signed": unit.signed, "headings": headings}


def _point(style: int, method: str, value: Interval | None, unit: Unit) -> Figure | None:
    if value is None:
        return None
    middle, low, high = (round(one * unit.scale, 6) for one in value)
    shown = unit.format(value[0]).removesuffix(unit.ending)
    return {"style": style, "method": method, "value": middle, "low": low, "high": high,
            "label": shown}  # fmt: skip


def _line(style: int, method: str, values: dict[str, float | None], unit: Unit) -> Figure:
    points = [
        {"layer": int(layer), "value": round(value * unit.scale, 6), "label": unit.format(value)}
        for layer, value in values.items()
        if value is not None and math.isfinite(value) and str(layer).isdigit()
    ]
    return {"style": style, "method": method, "points": points}


def _score(line: Line) -> Interval:
    return line.score.mean, line.score.low, line.score.high


def _judged(change: Comparison | None) -> Interval | None:
    if change is None or change.doubt is not None:
        return None
    return _finite(change.difference, change.low, change.high)


def _finite(value: float, low: float, high: float) -> Interval | None:
    """Return the value with its interval, itself twice where that is not finite."""
    if not math.isfinite(value):
        return None
    known = math.isfinite(low) and math.isfinite(high)
    return (value, low, high) if known else (value, value, value)
