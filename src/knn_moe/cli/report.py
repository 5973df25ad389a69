"""`knn-moe report`: evaluated runs as one page."""

from __future__ import annotations

from pathlib import Path

import click

from knn_moe.cli.common import log


@click.command(name="report")
@click.argument("runs", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
)
@click.option("--against", default="zero-shot", show_default=True, help="The method to beat.")
def command(runs: Path, output: Path, against: str) -> None:
    """Make one page of RUNS, with plots, that needs no network.

    \b
    knn-moe report runs -o report.html
    """
    from knn_moe.evaluation.store import read_runs
    from knn_moe.report.page import write_page
    from knn_moe.report.runs import render_runs

    write_page(render_runs(read_runs(runs), against), output)
    log.print(f"Written to {output}")
