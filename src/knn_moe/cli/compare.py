"""`knn-moe compare`: compare runs, with intervals and paired tests."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import (
    FOLDER,
    POSITIVE,
    against_option,
    json_option,
    print_json,
    print_paragraph,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from knn_moe.evaluation.compare import Line
    from knn_moe.evaluation.store import Run
    from knn_moe.support.statistics import Comparison

_COLUMNS = (
    "task", "method", "n", "score %", "95 % interval", "chance %", "unparsed %", "change",
    "95 % interval", "p", "p (Holm)", "NLL",
)  # fmt: skip
_ALWAYS = ("chance", "unparsed", "unparsed_share")  # columns of every CSV file


@click.command(name="compare")
@click.argument("runs", type=FOLDER)
@against_option
@click.option(
    "--resamples",
    type=POSITIVE,
    default=10_000,
    show_default=True,
    help="Draw this many bootstrap samples for intervals and p-values.",
)
@click.option("--latex", is_flag=True, help="Print a LaTeX table.")
@click.option("--csv", "as_csv", is_flag=True, help="Print all columns as comma-separated values.")
@json_option
def command(
    runs: Path, against: str, resamples: int, latex: bool, as_csv: bool, as_json: bool
) -> None:
    """Compare the methods in RUNS, a folder that eval wrote, on the questions they all answered.

    \b
    knn-moe compare runs
    knn-moe compare runs --against zero-shot --latex

    Changes are paired, with a bootstrap over questions. p (Holm) corrects p for the number of
    tasks, and "Avg." covers all questions of all tasks. chance is the score of guessing, and
    unparsed the share of outputs without an answer, which score 0. A change is not judged, and has
    no p, if the baseline is mostly unparsed or both scores are at chance. NLL is the mean loss per
    token of the prompts or texts; tasks scored by likelihood also have the loss of the right
    answer.
    """
    from knn_moe.evaluation.compare import compare_runs

    if latex + as_csv + as_json > 1:
        raise click.UsageError("Choose one of --json, --latex and --csv.")
    lines = compare_runs(runs, against, resamples)
    if as_json:
        print_json([line.to_dict() for line in lines])
    elif as_csv:
        print_text(_csv(lines), nl=False)
    elif latex:
        print_text(_latex(lines, against))
    else:
        _show_lines(lines, against)


def show_runs(runs: Sequence[Run], against: str) -> None:
    """Print runs compared with the method `against`, or with another if it is not among them."""
    from knn_moe.evaluation.compare import compare_runs

    methods = {run.method for run in runs}
    against = against if against in methods else min(methods)
    _show_lines(compare_runs(runs, against), against)


def _show_lines(lines: Sequence[Line], against: str) -> None:
    from knn_moe.evaluation.compare import explain_doubts

    by_likelihood = any(line.answer_loss is not None for line in lines)
    columns = (*_COLUMNS, "NLL of right answer") if by_likelihood else _COLUMNS
    rows = [_cells(line)[: len(columns)] for line in lines]
    print_table(f"Changes are against {against}", columns, rows)
    tasks = [line for line in lines if line.task != "Avg."]
    tested = {line.task for line in tasks if line.change}
    if len(tested) > 1:
        print_paragraph(
            f"{len(tested)} tasks were tested, and by chance alone one in twenty has p < 0.05. "
            f"p (Holm) corrects for that."
        )
    near_ties = sum(line.near_ties for line in tasks)
    if near_ties:
        print_paragraph(
            f"{near_ties} choices are decided by less than rounding errors. Another batch size may "
            f"give other scores for them."
        )
    for doubt in explain_doubts(lines):
        print_paragraph(doubt)


def _cells(line: Line) -> tuple[str, ...]:
    change = line.change
    judged = change is not None and change.doubt is None
    return (
        line.task,
        line.method,
        f"{line.items:,}",
        f"{100 * line.score.mean:.2f}",
        f"{100 * line.score.low:.1f} to {100 * line.score.high:.1f}",
        _percent(line.chance),
        _percent(line.unparsed_share),
        "-" if change is None else f"{100 * change.difference:+.2f}",
        "-" if change is None else f"{100 * change.low:+.2f} to {100 * change.high:+.2f}",
        f"{change.p:.4f}" if change is not None and judged else "-",
        f"{line.adjusted_p:.4f}" if line.adjusted_p is not None and judged else "-",
        _loss(line.nll, line.nll_change),
        _loss(line.answer_loss, line.answer_change),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _loss(value: float | None, change: Comparison | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" + ("" if change is None else f" ({change.difference:+.4f})")


def _csv(lines: Sequence[Line]) -> str:
    rows = [_flatten(line.to_dict()) for line in lines]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flatten(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{before}{name}_")
        elif value is not None or name in _ALWAYS:
            flat[f"{before}{name}"] = value
    return flat


def _latex(lines: Sequence[Line], against: str) -> str:
    """Return tasks as columns and methods as rows, with a star where p < 0.05.

    The first row has the chance levels; outputs without an answer are counted in brackets.
    """
    from knn_moe.evaluation.compare import explain_doubts

    tasks = list(dict.fromkeys(line.task for line in lines))
    methods = list(dict.fromkeys(line.method for line in lines))
    cells = {(line.method, line.task): line for line in lines}

    def cell(method: str, task: str) -> str:
        line = cells.get((method, task))
        if line is None:
            return "--"
        change = line.change
        p = None if change is None or change.doubt else line.adjusted_p or change.p
        star = "$^{*}$" if p is not None and p < 0.05 else ""
        return f"{100 * line.score.mean:.2f}{star}{unparsed(line)}"

    def unparsed(line: Line) -> str:
        share = line.unparsed_share
        return "" if share is None else rf" ({100 * share:.1f}\,\%)"

    def chance(task: str) -> str:
        known = (line.chance for line in lines if line.task == task)
        share = next((share for share in known if share is not None), None)
        return "--" if share is None else f"{100 * share:.2f}"

    rows = [
        " & ".join([_escape_tex(method), *(cell(method, task) for task in tasks)]) + r" \\"
        for method in methods
    ]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'c' * len(tasks)}}}",
            r"\toprule",
            " & ".join(["Method", *map(_escape_tex, tasks)]) + r" \\",
            r"\midrule",
            " & ".join(["Chance", *map(chance, tasks)]) + r" \\",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            rf"% * differs from {against} with p < 0.05 (paired bootstrap, Holm over tasks)",
            "% (in brackets) share of outputs without an answer, which score 0",
            *(f"% {doubt}" for doubt in explain_doubts(lines)),
        ]
    )


def _escape_tex(text: str) -> str:
    return text.replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")
