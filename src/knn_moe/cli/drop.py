"""`knn-moe drop`: a memory that has not read some examples."""

from __future__ import annotations

from pathlib import Path

import click

from knn_moe.cli.common import json_option, log, print_json


@click.command(name="drop")
@click.argument("memory")
@click.option(
    "--example", "examples", type=int, multiple=True, required=True, help="Number; repeatable."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder.")
@click.option("--overwrite", is_flag=True, help="Replace an existing memory.")
@json_option
def command(
    memory: str, examples: tuple[int, ...], output: Path, overwrite: bool, as_json: bool
) -> None:
    """Write MEMORY anew as if it had never read some examples of its reference set.

    \b
    knn-moe drop memory --example 17 -o memory-without
    knn-moe drop memory --example 17 --example 40 -o memory --overwrite

    Examples are counted from 0 in the order they were read. Their keys, values and tokens are
    gone, and what was written is read again to make sure. The others keep their numbers.
    """
    from knn_moe.memory.memory import RoutingMemory

    opened = RoutingMemory.from_pretrained(memory)
    with log.status("Dropping"):
        rest = opened.without(examples, folder=output, overwrite=overwrite)
    gone = len(opened) - len(rest)
    if as_json:
        facts = {"folder": str(output), "cases": len(rest), "dropped": gone}
        print_json({**facts, "examples": rest.provenance.num_examples, "bytes": rest.nbytes})
    else:
        log.print(f"{rest!r}\n{gone:,} cases of {len(set(examples))} examples are gone.")
        if opened.manifest.calibration is not None:
            log.print("Its calibration had read them and is forgotten: calibrate it again.")
