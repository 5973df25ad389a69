"""`knn-moe merge`: one memory of several."""

from __future__ import annotations

from pathlib import Path

import click

from knn_moe.cli.common import json_option, log, print_json


@click.command(name="merge")
@click.argument("memories", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder.")
@click.option(
    "--gamma-by-domain/--one-gamma",
    "by_domain",
    default=None,
    help="Each memory is a domain and keeps its γ; or one γ, computed anew. Default: one, unless "
    "some memory has several already.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing memory.")
@json_option
def command(
    memories: tuple[str, ...], output: Path, by_domain: bool | None, overwrite: bool, as_json: bool
) -> None:
    """Make one memory of MEMORIES, which must be of one model.

    \b
    knn-moe merge cardiology oncology -o medicine
    knn-moe merge medicine law -o office --gamma-by-domain
    """
    from knn_moe.memory.memory import RoutingMemory

    first, *others = (RoutingMemory.from_pretrained(memory) for memory in memories)
    with log.status(f"Merging {len(memories)} memories"):
        merged = first.merge(*others, folder=output, overwrite=overwrite, by_domain=by_domain)
    if as_json:
        facts = {"folder": str(output), "cases": len(merged), "bytes": merged.nbytes}
        print_json({**facts, "domains": merged.provenance.num_domains})
    else:
        log.print(f"{merged!r}\n{merged.nbytes / 1e6:,.1f} MB in {output}")
