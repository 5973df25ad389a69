"""`knn-moe merge`: one memory of several."""

from __future__ import annotations

from pathlib import Path

import click

from knn_moe.cli.common import json_option, log, print_json


@click.command(name="merge")
@click.argument("memories", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder.")
@click.option("--one-gamma", is_flag=True, help="They are of one domain: one γ, computed anew.")
@click.option("--overwrite", is_flag=True, help="Replace an existing memory.")
@json_option
def command(
    memories: tuple[str, ...], output: Path, one_gamma: bool, overwrite: bool, as_json: bool
) -> None:
    """Make one memory of MEMORIES, which must be of one model; each is a domain and keeps its γ.

    \b
    knn-moe merge medicine law -o office
    knn-moe merge cardiology-1 cardiology-2 -o cardiology --one-gamma
    """
    from knn_moe.memory import RoutingMemory

    first, *others = (RoutingMemory.from_pretrained(memory) for memory in memories)
    with log.status(f"Merging {len(memories)} memories"):
        merged = first.merge(*others, folder=output, overwrite=overwrite, one_gamma=one_gamma)
    if as_json:
        facts = {"folder": str(output), "cases": len(merged), "bytes": merged.nbytes}
        print_json({**facts, "domains": merged.provenance.num_domains})
    else:
        log.print(f"{merged!r}\n{merged.nbytes / 1e6:,.1f} MB in {output}")
