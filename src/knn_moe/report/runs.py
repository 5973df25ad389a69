"""The page of evaluated runs: scores, changes, routing, and passages where there are some.

Shows numbers only, never a question or an output: some tasks' authors ask for secrecy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from knn_moe.evaluation.compare import AVERAGE, TERCILES, Line, compare_runs, explain_doubts
from knn_moe.evaluation.store import Run
from knn_moe.pages.page import render
from knn_moe.pages.words import NATS_CHANGE, PLAIN, POINTS, SHARE, Unit
from knn_moe.report.charts import Bars, grouped_bars
from knn_moe.report.passages import FACTORS, Passage, show_passage
from knn_moe.support.statistics import Comparison
from knn_moe.tasks.task import TEXT

Value = tuple[float, float, float]  # and its interval


@dataclass(frozen=True)
class Introduction:
    """What a page says before its numbers, and the passages it shows."""

    title: str
    paragraphs: Sequence[str] = ()
    passages: Sequence[Passage] = ()


def render_runs(
    runs: Sequence[Run],
    against: str,
    resamples: int = 10_000,
    introduction: Introduction | None = None,
) -> str:
    """Return a page that compares runs.

    Args:
        against: The method that the others are compared with.
        resamples: Of the bootstrap.
        introduction: Title, text and passages of the page, if it tells a story of its own.

    Raises:
        RunError: The runs cannot be compared.
    """
    lines = compare_runs(runs, against, resamples)
    methods = list(dict.fromkeys(line.method for line in lines))
    tasks = list(dict.fromkeys(line.task for line in lines))
    tested = {line.task for line in lines if line.change and line.task != AVERAGE}
    context = {
        "introduction": introduction or _introduce(runs, against),
        "tasks": [(task, [line for line in lines if line.task == task]) for task in tasks],
        "routing": {(run.task, run.method): mean_routing(run) for run in runs},
        "runs": runs,
        "against": against,
        "methods": methods,
        "text": TEXT,
        "tested": len(tested),
        "near_ties": sum(line.near_ties for line in lines if line.task != AVERAGE),
        "questions": any(line.scoring != TEXT for line in lines),
        "doubts": explain_doubts(lines),
        "charts": list(_charts(lines, methods)),
        "layer_charts": list(_layer_charts(runs, methods)),
        "tercile_charts": list(_tercile_charts(lines, methods)),
        "passages": [show_passage(one) for one in introduction.passages] if introduction else [],
        "factors": FACTORS,
    }
    return render("runs.html.j2", context)


def _introduce(runs: Sequence[Run], against: str) -> Introduction:
    """Say what was evaluated, for a page without a story of its own."""
    models = ", ".join(dict.fromkeys(str(run.facts["model"]["name"]) for run in runs))
    tasks = ", ".join(dict.fromkeys(run.task for run in runs))
    others = [name for name in dict.fromkeys(run.method for run in runs) if name != against]
    compared = f"{', '.join(others)} compared with {against}" if others else f"{against} alone"
    return Introduction(f"{models} on {tasks}", (f"{compared[0].upper()}{compared[1:]}.",))


def mean_routing(run: Run) -> dict[str, float]:
    """Return "mean_confidence" (λ) and "rerouted", averaged over layers, where they are known."""
    return {
        name: sum(known) / len(known)
        for name, layers in run.facts.get("routing", {}).items()
        if (known := [value for value in layers.values() if value is not None])
    }


def _charts(lines: Sequence[Line], methods: Sequence[str]) -> Iterator[tuple[str, Markup]]:
    """Yield captions and charts, with a group of bars for each task."""
    for caption, unit, value_of in (
        ("Score", SHARE, lambda line: (line.score.mean, line.score.low, line.score.high)),
        ("Change of the score, in percentage points", POINTS, lambda x: _value(x.change)),
        (
            "Change of the loss, in nats per token of text: lower is better",
            NATS_CHANGE,
            lambda line: _value(line.nll_change) if line.scoring == TEXT else None,
        ),
    ):
        values = {(line.task, line.method): value_of(line) for line in lines}
        chart = _draw(caption, values, methods, unit)
        if chart:
            yield caption, chart


def _value(change: Comparison | None) -> Value | None:
    """Return what a chart shows of a change: nothing if it is in doubt."""
    if change is None or change.doubt is not None:
        return None
    return change.difference, change.low, change.high


def _draw(
    caption: str, values: Mapping[tuple[str, str], Value | None], methods: Sequence[str], unit: Unit
) -> Markup | None:
    """Draw the values of (category, method); None if there are none."""
    categories = list(dict.fromkeys(category for (category, _), value in values.items() if value))
    if not categories:
        return None
    none = (math.nan, math.nan, math.nan)
    bars = []
    for style, method in enumerate(methods):
        found = [values.get((category, method)) or none for category in categories]
        if any(value is not none for value in found):
            intervals = tuple((low, high) for _, low, high in found)
            bars.append(Bars(method, style, tuple(value for value, _, _ in found), intervals))
    return Markup(grouped_bars(caption, categories, bars, unit))


def _layer_charts(runs: Sequence[Run], methods: Sequence[str]) -> Iterator[tuple[str, Markup]]:
    """Yield captions and charts of what each layer's memory did, task by task."""
    tasks = dict.fromkeys(run.task for run in runs if run.facts.get("routing"))
    for task in tasks:
        for caption, field, unit in (
            ("Mean confidence (λ) by layer", "mean_confidence", PLAIN),
            ("Share of tokens rerouted, by layer", "rerouted", Unit(0, 100, "%")),
        ):
            values = {
                (f"layer {layer}", run.method): None if value is None else (value, value, value)
                for run in runs
                if run.task == task
                for layer, value in run.facts.get("routing", {}).get(field, {}).items()
            }
            chart = _draw(caption, values, methods, unit)
            if chart:
                yield caption if len(tasks) == 1 else f"{task}: {caption}", chart


def _tercile_charts(lines: Sequence[Line], methods: Sequence[str]) -> Iterator[tuple[str, Markup]]:
    """Yield tasks and charts of the change by how surprising the model alone found the text."""
    for task in dict.fromkeys(line.task for line in lines if line.by_perplexity):
        values = {
            (f"{third} perplexity", line.method): _value(line.by_perplexity[third])
            for line in lines
            if line.task == task and line.by_perplexity
            for third in TERCILES
        }
        chart = _draw(f"Change of the score on {task} by perplexity", values, methods, POINTS)
        if chart:
            yield task, chart
