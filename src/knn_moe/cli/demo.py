"""`knn-moe demo`: see the method work, on any machine, in two minutes."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from knn_moe.cli.common import json_option, print_json, print_table, progress_bar


@click.command(name="demo")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    help="Training steps of the small model.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Keep the memories in this folder.")
@json_option
def command(steps: int, out: Path | None, as_json: bool) -> None:
    """Train a small MoE on code, give it a memory of prose, and measure what that is worth.

    \b
    knn-moe demo
    knn-moe demo --steps 100 --out demo-out

    Everything it needs is on every machine that has Python: it learns from the source of the
    standard library and is tried on Python's documentation. Takes about two minutes on two cores.
    """
    from knn_moe.demo.run import run_demo
    from knn_moe.storage import refuse_existing

    if out is not None:
        refuse_existing(out, overwrite=False)
    with tempfile.TemporaryDirectory() as scratch, progress_bar("Demo") as update:
        result = run_demo(
            out or Path(scratch), steps, lambda stage, done, total: update(done, total, stage)
        )
    if as_json:
        print_json(asdict(result))
        return
    rows = [
        (
            row.way,
            f"{row.perplexity:.1f}",
            f"{row.nll:.3f}",
            f"{row.change:+.3f} ± {row.error:.3f}" if row.mean_confidence is not None else "-",
            f"{row.accuracy:.1%}",
            f"{row.mean_confidence:.2f}" if row.mean_confidence is not None else "-",
            f"{row.changed:.0%}" if row.changed is not None else "-",
        )
        for row in result.rows
    ]
    columns = ("", "perplexity", "nats/token", "change", "next token", "mean λ", "rerouted")
    title = (
        f"{result.test_tokens:,} tokens of Python's documentation; a memory of "
        f"{result.reference_tokens:,} others ({result.memory_bytes / 1e6:,.0f} MB)"
    )
    print_table(title, columns, rows)
