"""The page of evaluated runs: scores, changes, and where they come from, in one file.

Of a task whose authors ask for secrecy no question and no output is shown; of the others neither,
but counts: runs keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from knn_moe.evaluation.compare import AVERAGE, TERCILES, Line, compare_runs
from knn_moe.evaluation.store import Run
from knn_moe.report.charts import Series, grouped_bars
from knn_moe.report.page import render
from knn_moe.report.words import POINTS, SHARE


def render_runs(runs: Sequence[Run], against: str, resamples: int = 10_000) -> str:
    lines = compare_runs(runs, against, resamples)
    methods = list(dict.fromkeys(line.method for line in lines))
    context = {
        "lines": lines,
        "runs": runs,
        "against": against,
        "ways": methods,
        "average": AVERAGE,
        "tested": len({line.task for line in lines if line.change and line.task != AVERAGE}),
        "near_ties": sum(line.near_ties for line in lines if line.task != AVERAGE),
        "score_chart": _scores(lines, methods),
        "change_chart": _changes(lines, methods),
        "tercile_charts": list(_terciles(lines)),
    }
    return render("runs.html.j2", context)


def _scores(lines: Sequence[Line], methods: Sequence[str]) -> Markup:
    tasks = list(dict.fromkeys(line.task for line in lines))
    found = {(line.task, line.method): line.score for line in lines}
    series = []
    for style, method in enumerate(methods):
        scores = [found.get((task, method)) for task in tasks]
        series.append(
            Series(
                method,
                style,
                tuple(float("nan") if score is None else score.mean for score in scores),
                tuple((0.0, 0.0) if score is None else (score.low, score.high) for score in scores),
            )
        )
    return Markup(grouped_bars("Score by task and method", tasks, series, SHARE))


def _changes(lines: Sequence[Line], methods: Sequence[str]) -> Markup | None:
    changed = [line for line in lines if line.change is not None]
    if not changed:
        return None
    tasks = list(dict.fromkeys(line.task for line in changed))
    found = {(line.task, line.method): line.change for line in changed}
    series = []
    for style, method in enumerate(methods):
        changes = [found.get((task, method)) for task in tasks]
        if any(changes):
            series.append(
                Series(
                    method,
                    style,
                    tuple(float("nan") if one is None else one.difference for one in changes),
                    tuple((0.0, 0.0) if one is None else (one.low, one.high) for one in changes),
                )
            )
    return Markup(grouped_bars("Change by task and method", tasks, series, POINTS))


def _terciles(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The change by how surprising the model alone found the question."""
    charts = []
    for line in lines:
        if line.by_perplexity:
            changes = [line.by_perplexity[third] for third in TERCILES]
            bars = Series(
                line.method,
                1,
                tuple(change.difference for change in changes),
                tuple((change.low, change.high) for change in changes),
            )
            label = f"Change of {line.method} on {line.task} by perplexity"
            chart = grouped_bars(
                label, [f"{third} perplexity" for third in TERCILES], [bars], POINTS
            )
            charts.append({"task": line.task, "method": line.method, "chart": Markup(chart)})
    return charts
