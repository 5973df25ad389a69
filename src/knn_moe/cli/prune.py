"""`knn-moe prune`: keep the most useful cases of a memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from knn_moe.cli.common import (
    PATH,
    force_option,
    json_option,
    load_model,
    model_options,
    overwrite_option,
    print_note,
    show_progress,
    show_written,
)


@click.command(name="prune")
@click.argument("names", nargs=-1, required=True, metavar="[MODEL] MEMORY")
@click.option("--keep", default=0.1, show_default=True, help="Keep this share of the cases.")
@click.option(
    "--by",
    type=click.Choice(["loss", "chance"]),
    default="loss",
    show_default=True,
    help="Keep the cases that lower the loss of other examples most (loss, which needs MODEL), or "
    "random cases (chance).",
)
@click.option(
    "-o", "--output", type=PATH, help="Write the new memory to this folder. Default: MEMORY-pruned."
)
@overwrite_option
@force_option
@model_options
@json_option
def command(names: tuple[str, ...], output: Path | None, as_json: bool, **options: Any) -> None:
    """Keep the most useful cases of MEMORY and write them as a new memory.

    \b
    knn-moe prune tiny-olmoe memory --keep 0.25 -o memory-small
    knn-moe prune memory --keep 0.25 --by chance
    knn-moe calibrate tiny-olmoe memory-pruned -o calibrated

    Exact repeats of a case are dropped first. Only a memory pruned by chance can be calibrated on
    its own examples: if they chose the cases, they cannot also judge them.
    """
    from knn_moe.adapt.prune.prune import prune
    from knn_moe.memory.files import refuse_existing
    from knn_moe.memory.memory import RoutingMemory

    model, source = _split_names(names, options["by"])
    target = output or _pruned_folder(source)
    refuse_existing(target, overwrite=options["overwrite"])
    memory = RoutingMemory.from_pretrained(source)
    network: Any = None
    if model is not None:
        network, _ = load_model(model, options["device"], options["dtype"])
    chosen = {name: options[name] for name in ("keep", "by", "overwrite", "force")}
    with show_progress("Pruning") as report:
        small = prune(network, memory, **chosen, folder=target, on_progress=report)
    print_note(f"Kept {len(small):,} of {len(memory):,} cases.")
    show_written(small, target, as_json=as_json)


def _split_names(names: tuple[str, ...], by: str) -> tuple[str | None, str]:
    """Return the model, if there is one, and the memory."""
    if len(names) > 2:
        raise click.UsageError(
            f"Give a memory, or a model and a memory; got {len(names)} names: {' '.join(names)!r}."
        )
    model, source = (None, *names)[-2:]
    if by == "loss" and model is None:
        raise click.UsageError(
            "Pruning by loss needs the model. Put it before the memory, or use --by chance."
        )
    if by == "chance" and model is not None:
        raise click.UsageError(f"Pruning by chance uses no model. Leave out {model!r}.")
    return model, str(source)


def _pruned_folder(source: str) -> Path:
    """Return the folder beside `source`, or in the working directory if it is a hub id."""
    place = Path(source)
    name = f"{place.resolve().name}-pruned"
    return place.resolve().with_name(name) if place.is_dir() else Path(name)
