"""Tables of a study of pretrained models, made from the runs that are there.

A table says how many of its runs are missing, and which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, Final, TypeAlias

from knn_moe.methods import METHODS
from knn_moe.reproduce.pretrained import plan as p
from knn_moe.reproduce.pretrained.compare import Comparer, Result, Results
from knn_moe.reproduce.pretrained.plan import RunSpec
from knn_moe.reproduce.pretrained.study import PretrainedStudy
from knn_moe.reproduce.table import Cell, Chart, Series, Table, make_row, no_value, number, unparsed

BETTER, WORSE, BEATS, DOUBTED = "†", "‡", "*", "°"
_SHOWN: Final = 8  # missing runs that are named
MARKS: Final = (
    f"{BETTER} better and {WORSE} worse than zero-shot, {BEATS} better than a kNN-LM of the same "
    f"rows: p < 0.05 by a paired bootstrap over questions or windows, adjusted by Holm's method "
    f"for the number of tasks. {DOUBTED} not judged, because most outputs of zero-shot have no "
    f"answer or because both scores are at chance. Outputs without an answer (unparsed) score 0."
)
MakeTable: TypeAlias = Callable[[Comparer], Table]


def specs_of(study: PretrainedStudy, part: str) -> list[RunSpec]:
    return [spec for model in study.plan.models for spec in study.specs(part, model)]


def finish(study: PretrainedStudy, table: Table, specs: Sequence[RunSpec], found: Results) -> Table:
    """Add what is missing and how the runs were measured."""
    missing = [spec for spec in specs if spec not in found]
    notes = list(table.notes)
    if missing:
        named = "; ".join(map(str, missing[:_SHOWN]))
        more = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        notes.append(f"Missing: {len(missing)} of {len(specs)} runs ({named}{more}).")
    plan = study.plan
    facts: dict[str, Any] = {
        "models": list(plan.models),
        "tasks": {task: _describe_task(study, task) for task in {spec.task: 0 for spec in specs}},
        "seed": plan.seed,
        "preset": None,  # what is not the paper's is calibrated
        "batch_size": f"{plan.batch_tokens:,} tokens",
        "dtype": None,
        "hardware": None,
        "versions": {},
        **study.machine(),
    }
    return replace(table, notes=tuple(notes), facts=facts)


def _describe_task(study: PretrainedStudy, task: str) -> str:
    limit = study.plan.limit
    items = "whole test set" if limit is None else f"at most {limit:,} questions or windows"
    return f"{items} by {study.scoring(task)}, {study.size(task):,} reference rows"


def by_method(spec: RunSpec) -> tuple[str, str]:
    return spec.model, spec.method


def marks(result: Result) -> str:
    """Return how it compares with zero-shot and with a kNN-LM, and how much is unparsed."""
    if result.is_doubted():
        marks = DOUBTED
    else:
        marks = BETTER if result.is_better() else WORSE if result.is_worse() else ""
    marks += BEATS if result.is_better(p.RIVAL) else ""
    return marks + unparsed(result.unparsed_share)


def score_cell(result: Result | None) -> Cell:
    """Return an accuracy in percent with half of its 95 % interval."""
    if result is None:
        return no_value()
    half = (result.score.high - result.score.low) / 2
    text = f"{100 * result.score.mean:.1f} ± {100 * half:.1f}{marks(result)}"
    return Cell(text, 100 * result.score.mean)


def change_cell(result: Result | None) -> Cell:
    """Return the change against zero-shot in points or in nats; for zero-shot, the score itself."""
    if result is None:
        return no_value()
    change = result.changes.get(p.BASE)
    if change is None:
        return number(result.score.mean, ".3f") if result.is_text else score_cell(result)
    low, high, middle = change.comparison.low, change.comparison.high, change.difference
    half = (high - low) / 2
    if result.is_text:
        return Cell(f"{middle:+.3f} ± {half:.3f}{marks(result)}", middle)
    return Cell(f"{100 * middle:+.1f} ± {100 * half:.1f}{marks(result)}", 100 * middle)


def _by_task(comparer: Comparer, part: str, names: tuple[str, str], note: str) -> Table:
    """Return a table with a row for each method and a column for each task."""
    study = comparer.study
    specs = specs_of(study, part)
    found = comparer.compare(specs, by_method)
    tasks = list(dict.fromkeys(spec.task for spec in specs))
    titles = tuple(study.data(task).task.title for task in tasks)
    rows, charts = [], []
    for model in study.plan.models:
        lines: dict[str, list[Result | None]] = {}  # a result or None for each task, by method
        for spec in specs:
            if spec.model == model:
                line = lines.setdefault(spec.method, [None] * len(tasks))
                line[tasks.index(spec.task)] = found.get(spec)
        if not any(result for line in lines.values() for result in line):
            continue
        if part != p.TEXT_LOSS:
            rows.append(make_row(model, "Chance", *chances(lines[p.BASE]), *[no_value()] * 2))
        rows += [_method_row(model, method, line, part) for method, line in lines.items()]
        charts.append(_chart(model, titles, lines, part))
    table = Table(
        name=names[0],
        title=names[1],
        columns=("model", "method", *titles, "mean", "preparation, s"),
        rows=tuple(rows),
        notes=(note, MARKS),
        charts=tuple(charts),
    )
    return finish(study, table, specs, found)


def _method_row(
    model: str, method: str, line: Sequence[Result | None], part: str
) -> tuple[Cell, ...]:
    """Return a method's cells, their mean if all tasks are there, and its mean preparation."""
    is_text = part == p.TEXT_LOSS
    cells = [change_cell(one) if is_text else score_cell(one) for one in line]
    values = [cell.value for cell in cells if cell.value is not None]
    form = ".1f" if not is_text else ".3f" if method == p.BASE else "+.3f"
    whole = number(mean(values), form) if len(values) == len(cells) else no_value()
    seconds = [one.seconds for one in line if one is not None and one.seconds is not None]
    spent = number(mean(seconds) if seconds else None, ".1f")
    return make_row(model, METHODS[method].title, *cells, whole, spent)


def _chart(
    model: str,
    titles: tuple[str, ...],
    lines: Mapping[str, Sequence[Result | None]],
    part: str,
) -> Chart:
    series = [
        Series(METHODS[method].title, tuple(map(gain, line)))
        for method, line in lines.items()
        if method != p.BASE
    ]
    axis = "nats against zero-shot" if part == p.TEXT_LOSS else "points over zero-shot"
    return Chart("bars", titles, tuple(series), axis, model)


def chances(results: Sequence[Result | None]) -> list[Cell]:
    """Return what guessing scores, for each result that has choices."""
    return [no_value() if one is None else percent(one.chance) for one in results]


def percent(share: float | None) -> Cell:
    return no_value() if share is None else number(100 * share, ".1f")


def gain(result: Result | None) -> float | None:
    change = None if result is None else result.changes.get(p.BASE)
    if result is None or change is None:
        return None
    return change.difference if result.is_text else 100 * change.difference


def accuracy_table(comparer: Comparer) -> Table:
    """Make the table of accuracies by likelihood."""
    rows = comparer.study.plan.reference
    note = f"Accuracy in % with 95 % intervals; {rows:,} reference rows, or all there are."
    return _by_task(comparer, p.ACCURACY, ("pretrained-accuracy", "Questions"), note)


def generation_table(comparer: Comparer) -> Table:
    """Make the table of accuracies of generated answers."""
    note = "Share of right answers in %, generated greedily, with 95 % intervals."
    return _by_task(comparer, p.GENERATION, ("pretrained-generation", "Generated answers"), note)


def text_table(comparer: Comparer) -> Table:
    """Make the table of losses on text."""
    note = "Change of the loss in nats per token with 95 % intervals; zero-shot: the loss itself."
    return _by_task(comparer, p.TEXT_LOSS, ("pretrained-text", "Text"), note)


def details_table(part: str) -> MakeTable:
    """Return what makes the table of every run of a part, with p-values and seconds."""

    def make(comparer: Comparer) -> Table:
        study = comparer.study
        specs = specs_of(study, part)
        found = comparer.compare(specs, by_method)
        table = Table(
            name=f"pretrained-{part}-details",
            title=f"Every run of the part {part}",
            columns=(
                "model", "task", "method", "score", "95 %", "chance", "unparsed",
                "against zero-shot", "95 %", "p (Holm)", "against kNN-LM", "95 %",
                "p (Holm)", "preparation, s",
            ),
            rows=tuple(_detail_row(found[spec]) for spec in specs if spec in found),
            notes=(
                "Shares of right answers; for text, nats per token, of which less is better. A "
                "change without p is not judged: most outputs of the other method have no answer, "
                "or both scores are at chance.",
            ),
        )  # fmt: skip
        return finish(study, table, specs, found)

    return make


def _detail_row(result: Result) -> tuple[Cell, ...]:
    score = result.score
    cells = [number(score.mean, ".4f"), Cell(f"{score.low:.4f} to {score.high:.4f}")]
    cells += [number(share, ".4f") for share in (result.chance, result.unparsed_share)]
    for than in (p.BASE, p.RIVAL):
        change = result.changes.get(than)
        if change is None:
            cells += [no_value()] * 3
            continue
        interval = f"{change.comparison.low:+.4f} to {change.comparison.high:+.4f}"
        cells += [number(change.difference, "+.4f"), Cell(interval)]
        cells.append(number(None if change.comparison.doubt else change.adjusted_p, ".4f"))
    spec = result.spec
    title = METHODS[spec.method].title
    return make_row(spec.model, result.title, title, *cells, number(result.seconds, ".1f"))


def summary_table(comparer: Comparer) -> Table:
    """Make the table that counts the tasks on which each method is better or worse."""
    study = comparer.study
    parts = (p.ACCURACY, p.TEXT_LOSS)
    specs = [spec for part in parts for spec in specs_of(study, part)]
    found = comparer.compare(specs, lambda spec: (*by_method(spec), study.scoring(spec.task)))
    rows = []
    for model in study.plan.models:
        for method in study.plan.methods:
            ours = [r for s, r in found.items() if (s.model, s.method) == (model, method)]
            if method == p.BASE or not ours:
                continue
            cells = [x for is_text in (False, True) for x in _count_cells(ours, is_text)]
            seconds = [result.seconds for result in ours if result.seconds is not None]
            cells.append(number(mean(seconds) if seconds else None, ".1f"))
            rows.append(make_row(model, METHODS[method].title, *cells))
    heads = ("tasks", "better", "worse", "better than kNN-LM", "worse than kNN-LM", "mean change")
    columns = (*(f"questions: {x}" for x in heads), *(f"text: {x}" for x in heads))
    table = Table(
        name="pretrained-summary",
        title="Tasks on which each method is significantly better or worse than zero-shot",
        columns=("model", "method", *columns, "preparation, s"),
        rows=tuple(rows),
        notes=(
            "Numbers of tasks, p < 0.05 after Holm; those that are not judged count as neither "
            "better nor worse (most outputs of the other method have no answer, or both scores are "
            "at chance). Mean change: points, and nats per token.",
        ),
    )
    return finish(study, table, specs, found)


def _count_cells(results: Sequence[Result], is_text: bool) -> list[Cell]:
    ours = [result for result in results if result.is_text == is_text]
    counts = [len(ours)]
    for than in (p.BASE, p.RIVAL):
        counts += [sum(r.is_better(than) for r in ours), sum(r.is_worse(than) for r in ours)]
    gains = [value for result in ours if (value := gain(result)) is not None]
    change = number(mean(gains) if gains else None, "+.3f" if is_text else "+.1f")
    return [*(number(count, "d") for count in counts), change]
