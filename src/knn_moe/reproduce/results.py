"""Tables of how well each method answers (§5.2, §6.1, appendix C.1 and C.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final

from knn_moe.evaluation.compare import AVERAGE, TERCILES, Line, compare_runs
from knn_moe.evaluation.store import Run
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
from knn_moe.support.statistics import Comparison

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
_NATS: Final = ", nats"
MARKS: Final = (
    f"{BETTER} better and {WORSE} worse than zero-shot, p < 0.05: paired bootstrap over questions "
    f"or windows, not adjusted for the number of tests."
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
    asked = {study.data(task).task.name: task for task in tasks}  # a task may be asked by its file
    lines = compare_runs(runs, BASE) if runs else []
    return {(asked.get(line.task, line.task), line.method): line for line in lines}


def mark(line: Line, *, lower_is_better: bool = False) -> str:
    """Of a change that is no accident."""
    change = line.nll_change if lower_is_better else line.change
    if change is None or not change.significant or change.difference == 0:
        return ""
    return BETTER if (change.difference < 0) == lower_is_better else WORSE


def main(study: Study) -> Table:
    """Table 1: every method on every benchmark."""
    tasks, methods = study.plan.tasks, study.methods(MAIN)
    asked = [task for task in tasks if not study.is_text(task)]
    texts = [task for task in tasks if study.is_text(task)]
    heads = [study.title(task) for task in asked]
    heads += [AVERAGE] if len(asked) > 1 else []
    heads += [head for task in texts for head in (study.title(task), f"{study.title(task)}{_NATS}")]
    rows, charts = [], []
    for model in study.plan.models:
        lines = lines_of(study, model, methods, tasks)
        named = {}
        for method in methods:
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
    notes += left_out(study, methods)
    return Table(
        name="main",
        title="Main results",
        columns=("model", "method", *heads),
        rows=tuple(rows),
        notes=tuple(notes),
        charts=tuple(charts),
        facts=study.facts(tasks),
    )


def left_out(study: Study, methods: Sequence[str]) -> list[str]:
    """What could not be measured here, and why."""
    missing = [METHODS[name] for name in methods if not METHODS[name].installed]
    return [f"{entry.title} was not measured: {entry.package} is missing." for entry in missing]


def _accuracy(lines: Lines, task: str, method: str) -> Cell:
    line = lines.get((task, method))
    return nothing() if line is None else accuracy_cell(line)


def accuracy_cell(line: Line) -> Cell:
    return replace(percent(line.score.mean, mark(line)), change=_known(line.change))


def nats_cell(line: Line) -> Cell:
    """The change of the loss a token; nothing where the losses cannot be compared."""
    if line.nll_change is None:
        return nothing()
    cell = number(line.nll_change.difference, "+.3f", mark(line, lower_is_better=True))
    return replace(cell, change=_known(line.nll_change))


def _known(change: Comparison | None) -> Mapping[str, float] | None:
    return None if change is None else asdict(change)


def nats(lines: Lines, task: str, method: str) -> Cell:
    """The change of the loss a token; of the base itself, the loss."""
    line = lines.get((task, method))
    if line is None:
        return nothing()
    return number(line.nll, ".3f") if method == BASE else nats_cell(line)


def _bars(model: str, heads: Sequence[str], named: Mapping[str, Sequence[Cell]]) -> Chart:
    """Points over zero-shot, for what is an accuracy."""
    shown = [place for place, head in enumerate(heads) if not head.endswith(_NATS)]
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
    thirds = TERCILES[::-1]  # high first, as in the paper

    def cells(model: str, task: str) -> list[Cell]:
        line = lines_of(study, model, (BASE, KNN), [task])[task, KNN]
        found = [(line.by_perplexity or {}).get(third) for third in thirds]
        return [
            nothing() if part is None else points(part.difference, "*" if part.significant else "")
            for part in found
        ]

    table = by_benchmark(study, thirds, cells, "points over zero-shot")
    return replace(
        table,
        name="perplexity",
        title="Gains by perplexity",
        notes=("Points of accuracy, kNN-MoE less zero-shot. * p < 0.05 within the third.",),
    )


def by_benchmark(
    study: Study,
    heads: Sequence[str],
    cells_of: Callable[[str, str], Sequence[Cell]],
    axis: str,
) -> Table:
    """A row for each model and task, with a panel for each model; its name is still to be given."""
    rows, charts = [], []
    for model in study.plan.models:
        series = []
        for task in study.plan.tasks:
            cells = cells_of(model, task)
            rows.append(row(model, study.title(task), *cells))
            series.append(Series(study.title(task), values(cells)))
        charts.append(Chart("bars", tuple(heads), tuple(series), axis, model))
    return Table(
        name="",
        title="",
        columns=("model", "benchmark", *heads),
        rows=tuple(rows),
        charts=tuple(charts),
        facts=study.facts(study.plan.tasks),
    )


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
    methods = study.methods(methods)
    rows, charts = [], []
    for model in study.plan.models:
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
        notes=(f"Accuracy in %. {MARKS}", *left_out(study, methods)),
        charts=tuple(charts),
        facts=study.facts(tasks),
    )


def load_balancing(study: Study) -> Table:
    """Table 11: how evenly each method spreads tokens over experts."""
    methods = [name for name in study.methods(LOAD) if METHODS[name].installed]

    def cells(model: str, task: str) -> list[Cell]:
        return [_load(study.run(model, task, method)) for method in methods]

    heads = [METHODS[method].title for method in methods]
    return replace(
        by_benchmark(study, heads, cells, "load-balancing loss"),
        name="load-balancing",
        title="Load balancing",
        notes=(
            "N Σ f P over all layers, of all tokens that were read: wrong choices and the padding "
            "of choices included. The number of chosen experts is the least: even.",
            *left_out(study, LOAD),
        ),
    )


def _load(run: Run) -> Cell:
    return number(run.facts.get("load_balancing_loss"), ".3f")
