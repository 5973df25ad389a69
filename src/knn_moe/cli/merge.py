"""`knn-moe merge`: join several memories into one."""

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


@click.command(name="merge")
@click.argument("memories", nargs=-1, required=True)
@output_option
@overwrite_option
@json_option
def command(memories: tuple[str, ...], output: Path, overwrite: bool, as_json: bool) -> None:
    """Join MEMORIES into one memory. All must be of the same model.

    \b
    knn-moe merge cardiology oncology -o medicine

    The result has the settings of the first memory. The width (γ) of each layer is computed again
    for the joined cases. A calibration is not carried over: run knn-moe calibrate on the result.
    What was kept and dropped is said, and which settings differ. A memory is not merged with
    itself.
    """
    from knn_moe.memory.memory import RoutingMemory
    from knn_moe.memory.merging import describe_merge

    opened = [RoutingMemory.from_pretrained(memory) for memory in memories]
    with log.status(f"Merging {len(memories)} memories"):
        notes = describe_merge(opened)
        merged = opened[0].merge(*opened[1:], folder=output, overwrite=overwrite)
    show_written(merged, output, as_json=as_json, **({"notes": notes} if as_json else {}))
    if not as_json:
        for note in notes:
            print_note(note)
