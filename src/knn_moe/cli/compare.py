"""`knn-moe compare`: runs side by side, with intervals and paired tests."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import json_option, log, print_json, print_table

if TYPE_CHECKING:
    from knn_moe.evaluation.compare import Line
    from knn_moe.evaluation.store import Run
    from knn_moe.support.statistics import Comparison

_COLUMNS = ("task", "method", "n", "score %", "95 %", "change", "95 %", "p", "p (Holm)", "NLL")


@click.command(name="compare")
@click.argument("runs", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--against", default="zero-shot", show_default=True, help="The method to beat.")
@click.option("--resamples", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option("--latex", is_flag=True, help="A table for LaTeX.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated, all columns.")
@json_option
def command(
    runs: Path, against: str, resamples: int, latex: bool, as_csv: bool, as_json: bool
) -> None:
    """Compare the methods of RUNS on the questions they were all asked.

    \b
    knn-moe compare runs
    knn-moe compare runs --against zero-shot --latex

    Changes are paired, by bootstrap over questions; "Avg." is over all questions of all tasks.
    NLL is the mean loss of the prompts' tokens, or of a text's; by likelihood, the right answer's
    own loss is beside it.
    """
    from knn_moe.evaluation.compare import compare_runs
    from knn_moe.evaluation.store import read_runs

    if latex + as_csv + as_json > 1:
        raise click.UsageError("Choose one of --json, --latex and --csv.")
    lines = compare_runs(read_runs(runs), against, resamples)
    if as_json:
        print_json([line.to_dict() for line in lines])
    elif as_csv:
        click.echo(_csv(lines), nl=False)
    elif latex:
        click.echo(_latex(lines, against))
    else:
        show_lines(lines, against)


def show_runs(runs: Sequence[Run], against: str) -> None:
    """After an evaluation: compared where that method is among the runs."""
    from knn_moe.evaluation.compare import compare_runs

    methods = {run.method for run in runs}
    against = against if against in methods else min(methods)
    show_lines(compare_runs(runs, against), against)


def show_lines(lines: Sequence[Line], against: str) -> None:
    by_likelihood = any(line.answer_loss is not None for line in lines)
    columns = (*_COLUMNS, "right answer, nats") if by_likelihood else _COLUMNS
    rows = [_cells(line) + ((_answer(line),) if by_likelihood else ()) for line in lines]
    print_table(f"against {against}", columns, rows)
    tested = {line.task for line in lines if line.change and line.task != "Avg."}
    if len(tested) > 1:
        _note(
            f"{len(tested)} tasks were tested: by chance alone one in twenty has p < 0.05. "
            f"p (Holm) allows for that."
        )
    turned = sum(line.near_ties for line in lines if line.task != "Avg.")
    if turned:
        _note(
            f"{turned} choices are ahead by less than rounding may turn: another batch size may "
            f"give other scores there."
        )
    for line in lines:
        if line.unparsed and line.task != "Avg.":
            _note(f"{line.task}, {line.method}: no answer was found in {line.unparsed} outputs.")


def _note(text: str) -> None:
    log.print(text, soft_wrap=True)


def _cells(line: Line) -> tuple[str, ...]:
    change = line.change
    return (
        line.task,
        line.method,
        f"{line.items:,}",
        f"{100 * line.score.mean:.2f}",
        f"{100 * line.score.low:.1f} to {100 * line.score.high:.1f}",
        "-" if change is None else f"{100 * change.difference:+.2f}",
        "-" if change is None else f"{100 * change.low:+.2f} to {100 * change.high:+.2f}",
        "-" if change is None else f"{change.p:.4f}",
        "-" if line.adjusted_p is None else f"{line.adjusted_p:.4f}",
        _loss(line.nll, line.nll_change),
    )


def _answer(line: Line) -> str:
    return _loss(line.answer_loss, line.answer_change)


def _loss(value: float | None, change: Comparison | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" + ("" if change is None else f" ({change.difference:+.4f})")


def _csv(lines: Sequence[Line]) -> str:
    rows = [_flat(line.to_dict()) for line in lines]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}_")
        elif value is not None:
            found[f"{before}{name}"] = value
    return found


def _latex(lines: Sequence[Line], against: str) -> str:
    """Tasks across, methods down; what differs significantly from the baseline is marked."""
    tasks = list(dict.fromkeys(line.task for line in lines))
    methods = list(dict.fromkeys(line.method for line in lines))
    cells = {(line.method, line.task): line for line in lines}

    def cell(method: str, task: str) -> str:
        line = cells.get((method, task))
        if line is None:
            return "--"
        p = line.change.p if line.change and line.adjusted_p is None else line.adjusted_p
        marked = p is not None and p < 0.05
        return f"{100 * line.score.mean:.2f}" + ("$^{*}$" if marked else "")

    rows = [
        " & ".join([_tex(method), *(cell(method, task) for task in tasks)]) + r" \\"
        for method in methods
    ]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'c' * len(tasks)}}}",
            r"\toprule",
            " & ".join(["Method", *map(_tex, tasks)]) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            rf"% * differs from {against} with p < 0.05 (paired bootstrap, Holm over tasks)",
        ]
    )


def _tex(text: str) -> str:
    return text.replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")
