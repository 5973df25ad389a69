"""`knn-moe report`: write one page about evaluated runs."""

from __future__ import annotations

from pathlib import Path

import click

from knn_moe.cli.common import FILE, FOLDER, against_option, print_note


@click.command(name="report")
@click.argument("runs", type=FOLDER)
@click.option(
    "-o",
    "--output",
    type=FILE,
    default=Path("report.html"),
    show_default=True,
    help="Write the page to this file.",
)
@against_option
def command(runs: Path, output: Path, against: str) -> None:
    """Write an HTML page with the tables, charts and questions of RUNS, a folder that eval wrote.

    \b
    knn-moe report runs -o report.html

    The page is one file and needs no network. It shows the questions of the tasks, except of those
    whose authors ask that none be published: think of that before you publish it.
    """
    from knn_moe.evaluation.store import read_runs
    from knn_moe.pages.page import write_page
    from knn_moe.report.runs import render_runs
    from knn_moe.support.files import check_place

    check_place(output)
    write_page(render_runs(read_runs(runs), against), output)
    print_note(f"Wrote {output}.")
