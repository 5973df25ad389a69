"""Tables of how well each method answers (§5.2, §6.1, appendix C.1 and C.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from knn_moe.evaluation.compare import AVERAGE, TERCILES, Line, compare_runs
from knn_moe.evaluation.runs import Run
from knn_moe.methods import METHODS
from knn_moe.reproduce.study import Study
from knn_moe.reproduce.table import (
    Cell,
    Chart,
    Series,
    Table,
    nothing,
    number,
    percent,
    points,
    row,
    values,
)

BASE: Final = "zero-shot"
KNN: Final = "knn"
MAIN: Final = (
    BASE,
    "5-shot",
    "sft",
    "sft-router",
    "knn-paper",
    KNN,
    "knn-ivfpq",
    "knn-selective",
    "knn-gated",
    "c3po",
    "knn-lm",
    "knn+knn-lm",
    "router-bias",
)
C3PO: Final = (BASE, "c3po", "c3po-kernel", "c3po-mode", "knn-paper", KNN)
LOAD: Final = (BASE, "sft", "sft-router", "knn-paper", KNN)
BETTER, WORSE = "†", "‡"
MARKS: Final = (
    f"{BETTER} better and {WORSE} worse than zero-shot, p < 0.05, paired bootstrap over questions."
)

Lines = Mapping[tuple[str, str], Line]  # (task, method) → how it did


def runs_of(study: Study, model: str, methods: Sequence[str], tasks: Sequence[str]) -> list[Run]:
    """Each method on each task that it is defined for."""
    return [
        study.run(model, task, method)
        for task in tasks
        for method in methods
        if study.defined(method, task)
    ]


def lines_of(study: Study, model: str, methods: Sequence[str], tasks: Sequence[str]) -> Lines:
    runs = runs_of(study, model, methods, tasks)
    return {(line.task, line.method): line for line in compare_runs(runs, BASE)}


def mark(line: Line, *, lower_is_better: bool = False) -> str:
    """Of a change that is no accident."""
    change = line.nll_change if lower_is_better else line.change
    if change is None or not change.significant or change.difference == 0:
        return ""
    return BETTER if (change.difference < 0) == lower_is_better else WORSE


def main(study: Study) -> Table:
    """Table 1: every method on every benchmark."""
    tasks = study.plan.tasks
    asked = [task for task in tasks if not study.is_text(task)]
    texts = [task for task in tasks if study.is_text(task)]
    heads = [study.title(task) for task in asked]
    heads += [AVERAGE] if len(asked) > 1 else []
    heads += [head for task in texts for head in (study.title(task), f"{study.title(task)}, nats")]
    rows, charts = [], []
    for model in study.models:
        lines = lines_of(study, model, MAIN, tasks)
        named = {}
        for method in MAIN:
            cells = [_accuracy(lines, task, method) for task in asked]
            cells += [_accuracy(lines, AVERAGE, method)] if len(asked) > 1 else []
            for task in texts:
                cells += [_accuracy(lines, task, method), nats(lines, task, method)]
            named[method] = cells
            rows.append(row(model, METHODS[method].title, *cells))
        charts.append(_bars(model, heads, named))
    notes = [f"Accuracy in %, of the next token for text. {MARKS}"]
    if texts:
        notes.append("nats: the change of the loss a token against zero-shot; less is better.")
    return Table(
        name="main",
        title="Main results",
        columns=("model", "method", *heads),
        rows=tuple(rows),
        notes=tuple(notes),
        charts=tuple(charts),
        facts=study.facts(tasks),
    )


def _accuracy(lines: Lines, task: str, method: str) -> Cell:
    line = lines.get((task, method))
    return nothing() if line is None else percent(line.score.mean, mark(line))


def nats(lines: Lines, task: str, method: str) -> Cell:
    """The change of the loss a token; of the base itself, the loss."""
    line = lines.get((task, method))
    if line is None:
        return nothing()
    if line.nll_change is None:
        return number(line.nll, ".3f")
    return number(line.nll_change.difference, "+.3f", mark(line, lower_is_better=True))


def _bars(model: str, heads: Sequence[str], named: Mapping[str, Sequence[Cell]]) -> Chart:
    """Points over zero-shot, for what is an accuracy."""
    shown = [place for place, head in enumerate(heads) if not head.endswith(", nats")]
    base = values(named[BASE])
    series = []
    for method, cells in named.items():
        if method == BASE:
            continue
        differences = (_minus(cells[place].value, base[place]) for place in shown)
        series.append(Series(METHODS[method].title, tuple(differences)))
    places = tuple(heads[place] for place in shown)
    return Chart("bars", places, tuple(series), "points over zero-shot", model)


def _minus(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def perplexity(study: Study) -> Table:
    """Table 2: the gain by thirds of the base model's perplexity."""
    rows, charts = [], []
    thirds = TERCILES[::-1]  # high first, as in the paper
    for model in study.models:
        lines = lines_of(study, model, (BASE, KNN), study.plan.tasks)
        series = []
        for task in study.plan.tasks:
            found = lines[task, KNN].by_perplexity or {}
            cells = [
                points(found[third].difference, _sure(found[third].significant))
                if third in found
                else nothing()
                for third in thirds
            ]
            rows.append(row(model, study.title(task), *cells))
            series.append(Series(study.title(task), values(cells)))
        charts.append(Chart("bars", thirds, tuple(series), "points over zero-shot", model))
    return Table(
        name="perplexity",
        title="Gains by perplexity",
        columns=("model", "benchmark", *thirds),
        rows=tuple(rows),
        notes=("Points of accuracy, kNN-MoE less zero-shot. * p < 0.05 within the third.",),
        charts=tuple(charts),
        facts=study.facts(study.plan.tasks),
    )


def _sure(significant: bool) -> str:
    return "*" if significant else ""


def selective(study: Study) -> Table:
    """Table 3: kNN-MoE everywhere, not for the easiest third, and behind a gate."""
    return _by_method(study, "selective", "Selective", (BASE, KNN, "knn-selective", "knn-gated"))


def c3po(study: Study) -> Table:
    """Table 10: against C3PO."""
    tasks = [task for task in study.plan.tasks if not study.is_text(task)]
    return _by_method(study, "c3po", "Comparison with C3PO", C3PO, tasks)


def _by_method(
    study: Study,
    name: str,
    title: str,
    methods: Sequence[str],
    tasks: Sequence[str] | None = None,
) -> Table:
    """Accuracy of some methods on tasks, model by model."""
    tasks = study.plan.tasks if tasks is None else tasks
    rows, charts = [], []
    for model in study.models:
        lines = lines_of(study, model, methods, tasks)
        series = []
        for method in methods:
            cells = [_accuracy(lines, task, method) for task in tasks]
            rows.append(row(model, METHODS[method].title, *cells))
            series.append(Series(METHODS[method].title, values(cells)))
        heads = tuple(study.title(task) for task in tasks)
        charts.append(Chart("bars", heads, tuple(series), "accuracy (%)", model))
    return Table(
        name=name,
        title=title,
        columns=("model", "method", *(study.title(task) for task in tasks)),
        rows=tuple(rows),
        notes=(f"Accuracy in %. {MARKS}",),
        charts=tuple(charts),
        facts=study.facts(tasks),
    )


def load_balancing(study: Study) -> Table:
    """Table 11: how evenly each method spreads tokens over experts."""
    rows, charts = [], []
    for model in study.models:
        series = []
        for task in study.plan.tasks:
            cells = [_load(study.run(model, task, method)) for method in LOAD]
            rows.append(row(model, study.title(task), *cells))
            series.append(Series(study.title(task), values(cells)))
        heads = tuple(METHODS[method].title for method in LOAD)
        charts.append(Chart("bars", heads, tuple(series), "load-balancing loss", model))
    return Table(
        name="load-balancing",
        title="Load balancing",
        columns=("model", "benchmark", *(METHODS[method].title for method in LOAD)),
        rows=tuple(rows),
        notes=("N Σ f P over all layers; the number of chosen experts is the least: even.",),
        charts=tuple(charts),
        facts=study.facts(study.plan.tasks),
    )


def _load(run: Run) -> Cell:
    return number(run.facts.get("load_balancing_loss"), ".3f")
