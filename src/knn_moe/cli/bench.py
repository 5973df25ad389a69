"""`knn-moe bench`: speed, against a named baseline, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import device_option, json_option, log, pick_device, print_json, print_table

if TYPE_CHECKING:
    from knn_moe.bench.build import BuildBench, BuildMeasure


@click.group(name="bench")
def command() -> None:
    """Measure speed against a named baseline, in one run.

    \b
    knn-moe bench build
    knn-moe bench build --shape olmoe-1b-7b --length 200 --grow 0
    """


@command.command()
@click.option("--shape", default="small", show_default=True, help="Published shape to build.")
@click.option("--sequences", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--length", type=click.IntRange(min=2), default=32, show_default=True)
@click.option("--plain-sequences", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--batch-tokens", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option(
    "--grow",
    default=(2000, 4000, 8000),
    type=click.IntRange(min=0),
    multiple=True,
    show_default=True,
    help="More sequences, end to end; 0 for none.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Default: bfloat16 on a GPU, float32 on a CPU.",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where memories are written, and deleted again.",
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
    """How fast a memory is built, against the plain way of building it.

    \b
    knn-moe bench build
    knn-moe bench build --sequences 200 --grow 0
    knn-moe bench build --shape olmoe-1b-7b --length 200 --grow 0 --batch-tokens 12800

    Weights are random: the shapes are published models', their quality is not.
    """
    import torch

    from knn_moe.bench.build import BuildBench, measure_build
    from knn_moe.config import BuildConfig

    place = pick_device(device)
    bench = BuildBench(
        device=place,
        dtype=getattr(torch, dtype or ("bfloat16" if place.type == "cuda" else "float32")),
        config=BuildConfig(batch_tokens=batch_tokens),
        **options,
    )
    with log.status("") as status:
        sizes = tuple(size for size in grow if size)
        results = measure_build(bench, sizes, lambda step: status.update(step))
    if as_json:
        print_json([result.to_dict() for result in results])
    else:
        _show(bench, results)


def _show(bench: BuildBench, results: list[BuildMeasure]) -> None:
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
