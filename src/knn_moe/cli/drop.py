"""`knn-moe drop`: remove examples from a memory."""

from __future__ import annotations

from pathlib import Path

import click

from knn_moe.cli.common import (
    json_option,
    log,
    output_option,
    overwrite_option,
    print_note,
    show_written,
)


@click.command(name="drop")
@click.argument("memory")
@click.option(
    "--example",
    "examples",
    type=int,
    multiple=True,
    required=True,
    help="Remove the example with this number. Can be repeated.",
)
@output_option
@overwrite_option
@json_option
def command(
    memory: str, examples: tuple[int, ...], output: Path, overwrite: bool, as_json: bool
) -> None:
    """Write a copy of MEMORY that has never read some of its examples.

    \b
    knn-moe drop memory --example 17 -o memory-without
    knn-moe drop memory --example 17 --example 40 -o memory --overwrite

    Examples are numbered from 0 in the order of the reference set, and the others keep their
    numbers. The keys, values and tokens of the removed examples are deleted, and the command reads
    the new memory once more to verify that.
    """
    from knn_moe.memory.memory import RoutingMemory

    opened = RoutingMemory.from_pretrained(memory)
    with log.status("Removing examples"):
        rest = opened.without(examples, folder=output, overwrite=overwrite)
    removed = len(opened) - len(rest)
    facts = {"dropped": removed, "examples": rest.provenance.num_examples}
    show_written(rest, output, as_json=as_json, **facts)
    print_note(f"Removed {removed:,} cases of {len(set(examples))} examples.")
    if opened.manifest.calibration is not None:
        print_note("The calibration used these examples and was removed too. Calibrate again.")
