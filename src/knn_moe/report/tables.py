"""The tables of a report: results, what changed, layers, thirds, and how runs were measured.

Knows compared lines and runs; nothing of HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from knn_moe.evaluation.compare import AVERAGE, TERCILES, Line, match_samples
from knn_moe.evaluation.store import Run
from knn_moe.pages import words
from knn_moe.pages.table import Cell, Column, Table
from knn_moe.pages.words import Unit
from knn_moe.support.statistics import Comparison
from knn_moe.tasks.task import TEXT

REROUTED: Final = "rerouted"
CONFIDENCE: Final = "mean_confidence"
_CHANGE: Final = ("change", "change_low", "change_high", "change_p", "change_doubt")
_LOSS_CHANGE: Final = ("nll_change", "nll_change_low", "nll_change_high", "nll_change_p")


def tabulate_results(
    lines: Sequence[Line], routing: Mapping[tuple[str, str], Mapping[str, float]]
) -> Table:
    """Return the table of scores, losses and their changes; columns without numbers are left out.

    Args:
        routing: For each task and method with a memory, the means over its layers.
    """
    tested = {line.task for line in lines if line.change and line.task != AVERAGE}
    parts: list[tuple[bool, Column, list[Cell]]] = [
        (
            len({line.task for line in lines}) > 1,
            Column("Task", ("task",)),
            [Cell(line.task, (line.task,)) for line in lines],
        ),
        (True, Column("Method", ("method",)), [Cell(x.method, (x.method,)) for x in lines]),
        (True, Column("Items", ("items",)), [Cell(f"{x.items:,}", (x.items,)) for x in lines]),
        (True, Column("Score", ("score", "score_low", "score_high")), [_score(x) for x in lines]),
        (
            any(line.scoring != TEXT for line in lines),
            Column("Chance", ("chance",)),
            [_number(line.chance, words.SHARE) for line in lines],
        ),
        (
            any(line.unparsed is not None for line in lines),
            Column("Unparsed", ("unparsed_share",)),
            [_number(line.unparsed_share, words.SHARE) for line in lines],
        ),
        (
            bool(tested),
            Column("Change of score", _CHANGE),
            [_change(line.change, words.POINTS, lower_is_better=False) for line in lines],
        ),
        (len(tested) > 1, Column("p (Holm)", ("p_holm",)), [_holm(line) for line in lines]),
        (
            any(line.scoring == TEXT for line in lines),
            Column("Perplexity", ("perplexity",)),
            [_perplexity(line) for line in lines],
        ),
        (
            any(line.nll is not None for line in lines),
            Column("Nats per token", ("nll",)),
            [_number(line.nll, words.NATS) for line in lines],
        ),
        (
            any(line.nll_change is not None for line in lines),
            Column("Change of nats", _LOSS_CHANGE),
            [_change(x.nll_change, words.NATS_CHANGE, lower_is_better=True)for x in lines],
        ),
        (
            any(line.answer_loss is not None for line in lines),
            Column("Loss of right answer", ("answer_loss",)),
            [_number(line.answer_loss, words.NATS) for line in lines],
        ),
        *(
            (
                bool(routing),
                Column(title, (name,)),
                [_number(routing.get((x.task, x.method), {}).get(name), unit) for x in lines],
            )
            for title, name, unit in (
                ("Mean λ", CONFIDENCE, words.PLAIN),
                ("Rerouted", REROUTED, words.SHARE),
            )
        ),
    ]  # fmt: skip
    shown = [(column, cells) for has_numbers, column, cells in parts if has_numbers]
    columns = [column for column, _ in shown]
    rows = list(zip(*(cells for _, cells in shown), strict=True))
    header = next(place for place, column in enumerate(columns) if column.title == "Method")
    return Table("results", "Table of results", columns, rows, header)


def tabulate_changes(runs: Sequence[Run], against: str) -> Table | None:
    """Return how many questions each method gained and lost; None if nothing was compared."""
    bases = {run.task: run for run in runs if run.method == against}
    rows = []
    for run in runs:
        base = bases.get(run.task)
        if base is None or base is run or run.facts["scoring"] == TEXT:
            continue
        scores = [(ours.score, theirs.score) for ours, theirs in match_samples(run, base)]
        gained = sum(ours > theirs for ours, theirs in scores)
        lost = sum(ours < theirs for ours, theirs in scores)
        right = sum(ours == theirs == 1 for ours, theirs in scores)
        counts = (gained, lost, right, len(scores) - gained - lost - right)
        names = (run.task, run.method)
        rows.append(
            [*(Cell(name, (name,)) for name in names), *(Cell(f"{n:,}", (n,)) for n in counts)]
        )
    titles = ("Task", "Method", "Gained", "Lost", "Right in both", "Wrong in both")
    columns = [Column(title, (title.lower().replace(" ", "_"),)) for title in titles]
    return Table("changes", "Table of answers that changed", columns, rows, 1) if rows else None


def tabulate_layers(runs: Sequence[Run]) -> Table | None:
    """Return what each layer's memory did; None if no run had one."""
    rows = []
    for run in runs:
        routing = run.facts.get("routing", {})
        layers = list(dict.fromkeys(layer for values in routing.values() for layer in values))
        for layer in layers:
            place = int(layer) if str(layer).isdigit() else layer
            rows.append(
                [
                    Cell(run.task, (run.task,)),
                    Cell(run.method, (run.method,)),
                    Cell(str(layer), (place,)),
                    _number(routing.get(CONFIDENCE, {}).get(layer), words.PLAIN),
                    _number(routing.get(REROUTED, {}).get(layer), words.SHARE),
                ]
            )
    titles = ("Task", "Method", "Layer", "Mean λ", "Rerouted")
    names = ("task", "method", "layer", CONFIDENCE, REROUTED)
    columns = [Column(title, (name,)) for title, name in zip(titles, names, strict=True)]
    return Table("layers", "Table of layers", columns, rows, 1) if rows else None


def tabulate_thirds(lines: Sequence[Line]) -> Table | None:
    """Return the change of the score in each third of the items; None if there is none."""
    rows = [
        [
            Cell(line.task, (line.task,)),
            Cell(line.method, (line.method,)),
            Cell(third, (third,)),
            _change(line.by_perplexity[third], words.POINTS, lower_is_better=False),
        ]
        for line in lines
        if line.by_perplexity
        for third in TERCILES
    ]
    columns = [
        Column("Task", ("task",)),
        Column("Method", ("method",)),
        Column("Perplexity", ("perplexity_third",)),
        Column("Change of score", _CHANGE),
    ]
    return Table("thirds", "Table of changes by perplexity", columns, rows, 1) if rows else None


def tabulate_runs(runs: Sequence[Run]) -> Table:
    """Return on what, by what and in what time each run was measured."""
    titles = {
        "Task": "task",
        "Method": "method",
        "Model": "model",
        "Scored by": "scoring",
        "Data": "data",
        "Cases per layer": "cases",
        "Device": "device",
        "Type": "dtype",
        "Preparation, s": "preparation_seconds",
        "Evaluation, s": "seconds",
        "Load balancing": "load_balancing_loss",
    }
    rows = []
    for run in runs:
        facts = {**run.facts, "model": run.facts["model"]["name"]}
        facts["cases"] = run.facts.get("method_facts", {}).get("cases")
        rows.append([_fact(facts.get(name)) for name in titles.values()])
    columns = [Column(title, (name,)) for title, name in titles.items()]
    return Table("runs", "Table of runs", columns, rows, 1)


def _score(line: Line) -> Cell:
    score = line.score
    interval = words.format_interval(score.low, score.high, words.SHARE)
    return Cell(words.SHARE.format(score.mean), (score.mean, score.low, score.high), (interval,))


def _number(value: float | None, unit: Unit) -> Cell:
    return Cell(unit.format(value), (value,))


def _perplexity(line: Line) -> Cell:
    loss = line.nll if line.scoring == TEXT else None
    return Cell(words.format_perplexity(loss), (words.perplexity(loss),))


def _holm(line: Line) -> Cell:
    judged = line.change is not None and line.change.doubt is None
    p = line.adjusted_p if judged else None
    return Cell(words.NONE if p is None else words.format_p(p), (p,))


def _change(change: Comparison | None, unit: Unit, *, lower_is_better: bool) -> Cell:
    """Say what changed, its interval, its p where it is judged, and what may be concluded."""
    if change is None:
        return Cell(words.NONE, (None,) * (len(_LOSS_CHANGE) if lower_is_better else len(_CHANGE)))
    p = None if change.doubt else change.p
    notes = [words.format_interval(change.low, change.high, unit)]
    notes += [] if p is None else [words.format_p(p)]
    values = (change.difference, change.low, change.high, p)
    return Cell(
        unit.format(change.difference),
        values if lower_is_better else (*values, change.doubt),
        tuple(notes),
        words.judge_change(change, lower_is_better),
    )


def _fact(value: object) -> Cell:
    if value is None or value == "":
        return Cell(words.NONE, (None,))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(f"{value:,}", (value,))
    return Cell(str(value), (str(value),))
