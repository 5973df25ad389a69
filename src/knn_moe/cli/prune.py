"""`knn-moe prune`: a smaller memory that is worth as much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from knn_moe.cli.common import (
    device_option,
    dtype_option,
    json_option,
    load_model,
    log,
    print_json,
    progress_bar,
)


@click.command(name="prune")
@click.argument("names", nargs=-1, required=True, metavar="[MODEL] MEMORY")
@click.option("--keep", default=0.1, show_default=True, help="Share of the cases to keep.")
@click.option(
    "--by",
    type=click.Choice(["loss", "values", "chance"]),
    help="What a case is worth by. Default: loss with MODEL, values without.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="New folder. Default: MEMORY-pruned."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing memory.")
@click.option("--force", is_flag=True, help="Prune a memory that was built for another model.")
@device_option
@dtype_option
@json_option
def command(
    names: tuple[str, ...],
    keep: float,
    by: Any,
    output: Path | None,
    overwrite: bool,
    force: bool,
    device: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Keep the cases of MEMORY that are worth most, and write them as a new memory.

    \b
    knn-moe prune ./my-model memory --keep 0.25 -o memory-small
    knn-moe prune memory --keep 0.5
    knn-moe prune memory --keep 0.25 --by chance && knn-moe calibrate ./my-model memory-pruned

    By loss, a case is worth what it takes off the loss of reference tokens of other examples; by
    values, what can be told from the memory alone, which is much less. Exact repeats go first.
    What examples chose they cannot judge any more: only a memory pruned by chance can be
    calibrated on its own examples.
    """
    from knn_moe.adapt.prune.prune import prune
    from knn_moe.memory.files import refuse_existing
    from knn_moe.memory.memory import RoutingMemory

    model, source = _named(names, by)
    target = output or _beside(source)
    refuse_existing(target, overwrite=overwrite)
    memory = RoutingMemory.from_pretrained(source)
    network: Any = load_model(model, device, dtype)[0] if model else None
    with progress_bar("Pruning") as update:
        small = prune(
            network,
            memory,
            keep,
            by=by,
            folder=target,
            overwrite=overwrite,
            force=force,
            on_progress=lambda what, done, total: update(done, total, what),
        )
    if as_json:
        print_json({"folder": str(target), "cases": len(small), "bytes": small.nbytes})
    else:
        sizes = f"{memory.nbytes / 1e6:,.1f} MB → {small.nbytes / 1e6:,.1f} MB"
        log.print(f"{len(memory):,} → {len(small):,} cases, {sizes} in {target}")


def _named(names: tuple[str, ...], by: str | None) -> tuple[str | None, str]:
    """The model, if there is one, and the memory."""
    if len(names) > 2:
        raise click.UsageError(f"Give a memory, or a model and a memory; got {' '.join(names)!r}.")
    model, source = (None, *names)[-2:]
    if model is not None and by not in (None, "loss"):
        raise click.UsageError(f"To prune by {by} takes no model: leave out {model!r}.")
    return model, str(source)


def _beside(source: str) -> Path:
    """Where a pruned memory goes: beside its folder, or here where it is the hub's."""
    place = Path(source)
    name = f"{place.resolve().name}-pruned"
    return place.resolve().with_name(name) if place.is_dir() else Path(name)
