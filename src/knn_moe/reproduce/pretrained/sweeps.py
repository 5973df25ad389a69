"""Tables of what a memory is worth with other reference sets: more rows, other tasks', all tasks'.

Made from the runs that are there, like those in tables.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TypeAlias

from knn_moe.methods import METHODS
from knn_moe.reproduce.pretrained import plan as p
from knn_moe.reproduce.pretrained.compare import Comparer, Result
from knn_moe.reproduce.pretrained.plan import RunSpec
from knn_moe.reproduce.pretrained.tables import (
    MARKS,
    by_method,
    chances,
    change_cell,
    finish,
    gain,
    score_cell,
    specs_of,
)
from knn_moe.reproduce.table import Cell, Chart, Series, Table, make_row, no_value, number

Row: TypeAlias = tuple[Cell, ...]


def growth_table(comparer: Comparer) -> Table:
    """Make the table of scores by the number of reference rows."""
    study = comparer.study
    specs = specs_of(study, p.GROWTH)
    found = comparer.compare(specs, lambda spec: (*by_method(spec), spec.size))
    sizes = sorted({spec.size for spec in specs if spec.size is not None})
    rows, charts = [], []
    for model in study.plan.models:
        for task in study.plan.growing:
            base = found.get(RunSpec(model, task, p.BASE))
            series = []
            for method in dict.fromkeys(spec.method for spec in specs if spec.source):
                by_size = [found.get(RunSpec(model, task, method, task, size)) for size in sizes]
                if not any(by_size):
                    continue
                title = METHODS[method].title
                cells = [change_cell(result) for result in by_size]
                cells = [*chances([base]), _plain(base), *cells]
                rows.append(make_row(model, _title(comparer, task), title, *cells))
                series.append(Series(title, tuple(map(gain, by_size))))
            if series:
                places = tuple(f"{size:,}" for size in sizes)
                axis = "nats against zero-shot" if base and base.is_text else "points"
                heading = f"{model}, {_title(comparer, task)}"
                charts.append(Chart("lines", places, tuple(series), axis, heading))
    table = Table(
        name="pretrained-growth",
        title="More reference rows",
        columns=(
            "model",
            "task",
            "method",
            "chance",
            "zero-shot",
            *(f"{size:,}" for size in sizes),
        ),
        rows=tuple(rows),
        notes=("Change against zero-shot, in points or in nats per token, by rows.", MARKS),
        charts=tuple(charts),
    )
    return finish(study, table, specs, found)


def _plain(result: Result | None) -> Cell:
    if result is None:
        return no_value()
    return number(result.score.mean, ".3f") if result.is_text else score_cell(result)


def _title(comparer: Comparer, task: str) -> str:
    return comparer.study.data(task).task.title


def transfer_table(comparer: Comparer) -> Table:
    """Make the table of what was learned from one benchmark on the others."""
    study = comparer.study
    specs = specs_of(study, p.TRANSFER)
    found = comparer.compare(specs, lambda spec: (*by_method(spec), spec.source))
    tasks = list(dict.fromkeys(spec.task for spec in specs))
    groups = dict.fromkeys((s.model, s.method, s.source, s.size) for s in specs if s.source)
    rows = []
    for model, method, source, size in groups:
        line = {task: found.get(RunSpec(model, task, method, source, size)) for task in tasks}
        if not any(line.values()) or source is None:
            continue
        others = [result for task, result in line.items() if result is not None and task != source]
        counted = [one for one in others if not one.is_text]
        rows.append(
            make_row(
                model,
                _title(comparer, source),
                METHODS[method].title,
                *(change_cell(line[task]) for task in tasks),
                _mean_gain(counted),
                f"{sum(one.is_better() for one in others)} / {sum(map(Result.is_worse, others))}",
            )
        )
    table = Table(
        name="pretrained-transfer",
        title="What was learned from one benchmark, on the others",
        columns=(
            "model", "learned from", "method", *(_title(comparer, task) for task in tasks),
            "mean of other questions", "others better / worse",
        ),
        rows=_with_chance(comparer, tasks, rows),
        notes=("Change against zero-shot, in points or in nats per token.", MARKS),
    )  # fmt: skip
    return finish(study, table, specs, found)


def _with_chance(comparer: Comparer, tasks: Sequence[str], rows: Sequence[Row]) -> tuple[Row, ...]:
    """Put a row of chance levels before the rows, for each of their models."""
    added = []
    for model in dict.fromkeys(row[0].text for row in rows):
        bases = [RunSpec(model, task, p.BASE) for task in tasks]
        found = comparer.compare(bases, by_method)
        cells = chances([found.get(base) for base in bases])
        rest = len(rows[0]) - len(cells) - 3
        added.append(make_row(model, "", "Chance", *cells, *[no_value()] * rest))
    return *added, *rows


def _mean_gain(results: Sequence[Result]) -> Cell:
    gains = [value for one in results if (value := gain(one)) is not None]
    return number(mean(gains) if gains else None, "+.1f")


def together_table(comparer: Comparer) -> Table:
    """Make the table of one reference set for all benchmarks against one for each."""
    study = comparer.study
    specs = specs_of(study, p.TOGETHER)
    found = comparer.compare(specs, lambda spec: (*by_method(spec), spec.source == p.ALL))
    tasks = list(dict.fromkeys(spec.task for spec in specs))
    rows = []
    for model in study.plan.models:
        for method in dict.fromkeys(spec.method for spec in specs if spec.source):
            alone = {task: found.get(study.own(model, task, method)) for task in tasks}
            size = study.plan.reference
            joined = {t: found.get(RunSpec(model, t, method, p.ALL, size)) for t in tasks}
            for name, line in (("each alone", alone), ("all together", joined)):
                if any(line.values()):
                    cells = [change_cell(line[task]) for task in tasks]
                    known = [result for result in line.values() if result is not None]
                    share = _kept(alone, joined) if line is joined else no_value()
                    title = METHODS[method].title
                    rows.append(make_row(model, title, name, *cells, _mean_gain(known), share))
    titles = (_title(comparer, task) for task in tasks)
    table = Table(
        name="pretrained-together",
        title="One reference set for all benchmarks",
        columns=("model", "method", "reference", *titles, "mean", "kept"),
        rows=_with_chance(comparer, tasks, rows),
        notes=(
            "Change against zero-shot in points. Kept: the sum of these changes all together, as a "
            "share of that of each alone, over the tasks that have both.",
            MARKS,
        ),
    )
    return finish(study, table, specs, found)


def _kept(alone: Mapping[str, Result | None], joined: Mapping[str, Result | None]) -> Cell:
    both = [(gain(alone[task]), gain(joined[task])) for task in alone]
    known = [(one, other) for one, other in both if one is not None and other is not None]
    total = sum(one for one, _ in known)
    return number(100 * sum(x for _, x in known) / total, ".0f", " %") if total > 0 else no_value()
