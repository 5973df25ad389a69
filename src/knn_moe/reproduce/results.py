"""Tables of how well each method answers (§5.2, §6.1, appendix C.1 and C.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from knn_moe.evaluation.compare import AVERAGE, TERCILES, Line, compare_runs
from knn_moe.methods import METHODS
from knn_moe.reproduce.study import Study
from knn_moe.reproduce.table import (
    Cell,
    Chart,
    Series,
    Table,
    make_row,
    no_value,
    number,
    percent,
    points,
    unparsed,
    values_of,
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
    "c3po",
    "knn-lm",
    "knn+knn-lm",
)
C3PO: Final = (BASE, "c3po", "c3po-kernel", "c3po-mode", "knn-paper", KNN)
LOAD: Final = (BASE, "sft", "sft-router", "knn-paper", KNN)
BETTER, WORSE, DOUBTED = "†", "‡", "°"
_NATS: Final = ", nats"
MARKS: Final = (
    f"{BETTER} better and {WORSE} worse than zero-shot, p < 0.05: paired bootstrap over questions "
    f"or windows, not adjusted for the number of tests. {DOUBTED} not judged, because most outputs "
    f"of zero-shot have no answer or because both scores are at chance. Outputs without an answer "
    f"(unparsed) score 0."
)
CHANCE: Final = "Chance"  # the row of what guessing scores

Lines = Mapping[tuple[str, str], Line]  # by (task, method)


def compare_methods(
    study: Study, model: str, methods: Sequence[str], tasks: Sequence[str]
) -> Lines:
    """Run each method on each task it is defined for, and compare all with zero-shot."""
    runs = [
        study.run(model, task, method)
        for task in tasks
        for method in methods
        if study.is_defined(method, task)
    ]
    given = {study.data(task).task.name: task for task in tasks}  # a task may be given as a file
    lines = compare_runs(runs, BASE) if runs else []
    return {(given.get(line.task, line.task), line.method): line for line in lines}


def mark(line: Line, *, lower_is_better: bool = False) -> str:
    """Return the mark of a significant change or of one that is in doubt, or nothing."""
    change = line.nll_change if lower_is_better else line.change
    if change is not None and change.doubt is not None:
        return DOUBTED
    if change is None or not change.significant or change.difference == 0:
        return ""
    return BETTER if (change.difference < 0) == lower_is_better else WORSE


def main(study: Study) -> Table:
    """Make Table 1: every method on every benchmark."""
    tasks, methods = study.plan.tasks, study.choose_methods(MAIN)
    questions = [task for task in tasks if not study.is_text(task)]
    texts = [task for task in tasks if study.is_text(task)]
    heads = [study.title(task) for task in questions]
    heads += [AVERAGE] if len(questions) > 1 else []
    heads += [head for task in texts for head in (study.title(task), f"{study.title(task)}{_NATS}")]
    rows, charts = [], []
    for model in study.plan.models:
        lines = compare_methods(study, model, methods, tasks)
        named = {}
        if questions:
            shown = [*questions, *([AVERAGE] if len(questions) > 1 else [])]
            empty = [no_value()] * (len(heads) - len(shown))
            rows.append(make_row(model, CHANCE, *chance_cells(lines, shown), *empty))
        for method in methods:
            cells = [_accuracy(lines, task, method) for task in questions]
            cells += [_accuracy(lines, AVERAGE, method)] if len(questions) > 1 else []
            for task in texts:
                cells += [_accuracy(lines, task, method), _nats(lines, task, method)]
            named[method] = cells
            rows.append(make_row(model, METHODS[method].title, *cells))
        charts.append(_chart_gains(model, heads, named))
    notes = [f"Accuracy in %; for text, of the next token. {MARKS}"]
    if texts:
        notes.append("nats: the change of the loss per token against zero-shot; lower is better.")
    notes += left_out(methods)
    return Table(
        name="main",
        title="Main results",
        columns=("model", "method", *heads),
        rows=tuple(rows),
        notes=tuple(notes),
        charts=tuple(charts),
        facts=study.facts(tasks),
    )


def left_out(methods: Sequence[str]) -> list[str]:
    """Say which methods could not be measured here, and why."""
    missing = [METHODS[name] for name in methods if not METHODS[name].installed]
    return [f"{spec.title} was not measured: {spec.package} is not installed." for spec in missing]


def _accuracy(lines: Lines, task: str, method: str) -> Cell:
    line = lines.get((task, method))
    return no_value() if line is None else accuracy_cell(line)


def accuracy_cell(line: Line) -> Cell:
    """Return the accuracy in percent, marked if it differs significantly from zero-shot."""
    marks = f"{mark(line)}{unparsed(line.unparsed_share)}"
    return replace(percent(line.score.mean, marks), change=_change_facts(line.change))


def chance_cells(lines: Lines, tasks: Sequence[str]) -> list[Cell]:
    """Return what guessing scores on each task, where it is known."""
    found = [lines.get((task, BASE)) for task in tasks]
    return [percent(None if line is None else line.chance) for line in found]


def nats_cell(line: Line) -> Cell:
    """Return the change of the loss per token, if the losses can be compared."""
    if line.nll_change is None:
        return no_value()
    cell = number(line.nll_change.difference, "+.3f", mark(line, lower_is_better=True))
    return replace(cell, change=_change_facts(line.nll_change))


def _change_facts(change: Comparison | None) -> Mapping[str, Any] | None:
    return None if change is None else asdict(change)


def _nats(lines: Lines, task: str, method: str) -> Cell:
    """Return the change of the loss per token; for zero-shot, the loss itself."""
    line = lines.get((task, method))
    if line is None:
        return no_value()
    return number(line.nll, ".3f") if method == BASE else nats_cell(line)


def _chart_gains(model: str, heads: Sequence[str], named: Mapping[str, Sequence[Cell]]) -> Chart:
    """Chart the accuracies as percentage points over zero-shot."""
    shown = [place for place, head in enumerate(heads) if not head.endswith(_NATS)]
    base = values_of(named[BASE])
    series = []
    for method, cells in named.items():
        if method == BASE:
            continue
        differences = (_subtract(cells[place].value, base[place]) for place in shown)
        series.append(Series(METHODS[method].title, tuple(differences)))
    places = tuple(heads[place] for place in shown)
    return Chart("bars", places, tuple(series), "points over zero-shot", model)


def _subtract(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def perplexity(study: Study) -> Table:
    """Make Table 2: the gain in each third of the base model's perplexity."""
    thirds = TERCILES[::-1]  # high first, as in the paper
    notes = [
        f"Percentage points of accuracy, kNN-MoE minus zero-shot. * p < 0.05 within the third. "
        f"{DOUBTED} not judged, because most outputs of zero-shot have no answer or because both "
        f"scores are at chance."
    ]

    def cells(model: str, task: str) -> list[Cell]:
        lines = compare_methods(study, model, (BASE, KNN), [task])
        line = lines[task, KNN]
        if not study.is_text(task):
            notes.append(
                _describe_footing(f"{model}, {study.title(task)}", lines[task, BASE], line)
            )
        found = [(line.by_perplexity or {}).get(third) for third in thirds]
        return [no_value() if part is None else _third_cell(part) for part in found]

    table = by_benchmark(study, thirds, cells, "points over zero-shot")
    return replace(
        table,
        name="perplexity",
        title="Gains by perplexity",
        notes=tuple(notes),
    )


def _third_cell(change: Comparison) -> Cell:
    return points(change.difference, DOUBTED if change.doubt else "*" * change.significant)


def _describe_footing(name: str, base: Line, line: Line) -> str:
    """Say what the scores behind a difference rest on."""
    scores = percent(base.chance), accuracy_cell(base), accuracy_cell(line)
    return "{}: chance {}, zero-shot {}, kNN-MoE {}.".format(name, *(cell.text for cell in scores))


def by_benchmark(
    study: Study,
    heads: Sequence[str],
    cells_of: Callable[[str, str], Sequence[Cell]],
    axis: str,
) -> Table:
    """Return a table with a row for each model and task, without its name."""
    rows, charts = [], []
    for model in study.plan.models:
        series = []
        for task in study.plan.tasks:
            cells = cells_of(model, task)
            rows.append(make_row(model, study.title(task), *cells))
            series.append(Series(study.title(task), values_of(cells)))
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
    """Make Table 3: kNN-MoE for all questions, and without the easiest third."""
    return _by_method(study, "selective", "Selective", (BASE, KNN, "knn-selective"))


def c3po(study: Study) -> Table:
    """Make Table 10: kNN-MoE against C3PO."""
    tasks = [task for task in study.plan.tasks if not study.is_text(task)]
    return _by_method(study, "c3po", "Comparison with C3PO", C3PO, tasks)


def _by_method(
    study: Study,
    name: str,
    title: str,
    methods: Sequence[str],
    tasks: Sequence[str] | None = None,
) -> Table:
    """Return the accuracy of methods on tasks, model by model."""
    tasks = study.plan.tasks if tasks is None else tasks
    methods = study.choose_methods(methods)
    rows, charts = [], []
    for model in study.plan.models:
        lines = compare_methods(study, model, methods, tasks)
        series = []
        rows.append(make_row(model, CHANCE, *chance_cells(lines, tasks)))
        for method in methods:
            cells = [_accuracy(lines, task, method) for task in tasks]
            rows.append(make_row(model, METHODS[method].title, *cells))
            series.append(Series(METHODS[method].title, values_of(cells)))
        heads = tuple(study.title(task) for task in tasks)
        charts.append(Chart("bars", heads, tuple(series), "accuracy (%)", model))
    return Table(
        name=name,
        title=title,
        columns=("model", "method", *(study.title(task) for task in tasks)),
        rows=tuple(rows),
        notes=(f"Accuracy in %. {MARKS}", *left_out(methods)),
        charts=tuple(charts),
        facts=study.facts(tasks),
    )


def load_balancing(study: Study) -> Table:
    """Make Table 11: how evenly each method spreads tokens over experts."""
    methods = [name for name in study.choose_methods(LOAD) if METHODS[name].installed]

    def cells(model: str, task: str) -> list[Cell]:
        runs = [study.run(model, task, method) for method in methods]
        return [number(run.facts.get("load_balancing_loss"), ".3f") for run in runs]

    heads = [METHODS[method].title for method in methods]
    return replace(
        by_benchmark(study, heads, cells, "load-balancing loss"),
        name="load-balancing",
        title="Load balancing",
        notes=(
            "N Σ f P over all layers, of all tokens that were read, including wrong choices and "
            "their padding. The least possible value, an even load, is the number of experts "
            "chosen per token.",
            *left_out(LOAD),
        ),
    )
