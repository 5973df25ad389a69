"""`knn-moe bench`: speed, against a named baseline, in one run."""

from __future__ import annotations

from pathlib import Path

import click

from knn_moe.cli.common import device_option, json_option, log, pick_device, print_json, print_table


@click.group(name="bench")
def command() -> None:
    """Measure speed against a named baseline, in one run.

    \b
    knn-moe bench build
    knn-moe bench build --shape olmoe-1b-7b --device cuda
    """


@command.command()
@click.option("--shape", default="small", show_default=True, help="Published shape to build.")
@click.option("--sequences", default=1000, show_default=True)
@click.option("--length", default=200, show_default=True, help="Tokens in a sequence.")
@click.option("--plain-sequences", default=20, show_default=True, help="For the baseline.")
@click.option("--batch-tokens", default=8192, show_default=True)
@click.option("--grow", default="", help="More sizes end to end, such as 1000,2000,4000,8000.")
@click.option("--dtype", default=None, help="Default: bfloat16 on a GPU, float32 on a CPU.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where memories are written.")
@device_option
@json_option
def build(
    shape: str,
    sequences: int,
    length: int,
    plain_sequences: int,
    batch_tokens: int,
    grow: str,
    dtype: str | None,
    folder: Path | None,
    device: str | None,
    as_json: bool,
) -> None:
    """How fast a memory is built, against the plain way of building it.

    \b
    knn-moe bench build --sequences 200
    knn-moe bench build --grow 1000,2000,4000,8000 --length 50
    knn-moe bench build --shape olmoe-1b-7b --device cuda --batch-tokens 12800

    Weights are random: the shapes are published models', their quality is not.
    """
    import torch

    from knn_moe.bench.build import BuildBench, measure_build
    from knn_moe.config import BuildConfig

    place = pick_device(device)
    bench = BuildBench(
        shape=shape,
        sequences=sequences,
        length=length,
        plain_sequences=plain_sequences,
        device=place,
        dtype=getattr(torch, dtype or ("bfloat16" if place.type == "cuda" else "float32")),
        config=BuildConfig(batch_tokens=batch_tokens),
        folder=folder,
    )
    growth = tuple(int(size) for size in grow.split(",") if size)
    with log.status("") as status:
        results = measure_build(bench, growth, lambda step: status.update(step))
    if as_json:
        print_json([result.to_dict() for result in results])
        return
    baseline = results[0].tokens_per_second
    title = f"{shape}, S = 1, sequences of {length} tokens, on {place}"
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
