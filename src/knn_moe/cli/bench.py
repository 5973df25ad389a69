"""`knn-moe bench`: measure speed against a named baseline, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.bench_common import count_option, dtype_option, pick_dtype, show_stage
from knn_moe.cli.bench_retrieval import retrieval
from knn_moe.cli.bench_serve import serve
from knn_moe.cli.common import device_option, json_option, print_json, print_table
from knn_moe.routers.load import pick_device

if TYPE_CHECKING:
    from knn_moe.bench.build_speed import BuildBench, BuildMeasure


@click.group(name="bench")
def command() -> None:
    """Measure speed against a named baseline, in one run.

    \b
    knn-moe bench build
    knn-moe bench build --shape olmoe-1b-7b --length 200 --grow 0
    knn-moe bench retrieval
    knn-moe bench retrieval --shape olmoe-1b-7b --plot retrieval.svg
    knn-moe bench serve
    """


@command.command()
@click.option("--shape", default="small", show_default=True, help="Published shape of the model.")
@count_option("--sequences", default=1000, help="Sequences to build a memory of.")
@count_option("--length", least=2, default=32, help="Tokens in a sequence.")
@count_option(
    "--plain-sequences", default=20, help="Sequences for the plain implementation, which is slow."
)
@count_option("--batch-tokens", default=8192, help="Tokens in a batch.")
@count_option(
    "--grow",
    least=0,
    default=(2000, 4000, 8000),
    multiple=True,
    help="Also build end to end with this many sequences; 0: no more. May be repeated.",
)
@dtype_option
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder in which memories are written and deleted again.",
)
@device_option
@json_option
def build(
    grow: tuple[int, ...],
    batch_tokens: int,
    dtype: str | None,
    device: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how fast a memory is built, against a plain implementation.

    \b
    knn-moe bench build
    knn-moe bench build --sequences 200 --grow 0
    knn-moe bench build --shape olmoe-1b-7b --length 200 --grow 0 --batch-tokens 12800

    The models have published shapes and random weights, so only speed is measured, not quality.
    """
    from knn_moe.bench.build_speed import BuildBench, measure_build
    from knn_moe.config import BuildConfig

    place = pick_device(device)
    bench = BuildBench(
        device=place,
        dtype=pick_dtype(dtype, place),
        config=BuildConfig(batch_tokens=batch_tokens),
        **options,
    )
    with show_stage() as on_progress:
        results = measure_build(bench, tuple(size for size in grow if size), on_progress)
    if as_json:
        print_json([result.to_dict() for result in results])
    else:
        _show_build(bench, results)


def _show_build(bench: BuildBench, results: list[BuildMeasure]) -> None:
    baseline = results[0].tokens_per_second
    title = f"{bench.shape}, S = 1, sequences of {bench.length} tokens, on {bench.device}"
    columns = ("way", "sequences", "seconds", "tokens/s", "× plain", "peak GB", "disk GB")
    rows = [
        (
            result.way,
            f"{result.sequences:,}",
            f"{result.seconds:.2f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.tokens_per_second / baseline:.1f}",
            f"{result.peak_gb:.2f}",
            f"{result.disk_gb:.2f}",
        )
        for result in results
    ]
    print_table(title, columns, rows)
    for result in results:
        if result.stages:
            parts = ", ".join(f"{stage} {spent:.2f} s" for stage, spent in result.stages.items())
            click.echo(f"{result.sequences:,} sequences end to end: {parts}")


command.add_command(retrieval)
command.add_command(serve)
