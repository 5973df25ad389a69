"""`knn-moe compress`: a memory with an index in its keys' place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import (
    device_option,
    json_option,
    log,
    pick_device,
    print_json,
    progress_bar,
)
from knn_moe.cli.inspect import layer_facts, show_layers

if TYPE_CHECKING:
    from knn_moe.memory.memory import RoutingMemory


@click.command(name="compress")
@click.argument("memory")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder.")
@click.option(
    "--index",
    "kind",
    type=click.Choice(["fast", "ivfpq", "faiss-flat"]),
    default="fast",
    show_default=True,
)
@click.option("--dims", type=int, help="Projected width. Default: an eighth (fast: at least 256).")
@click.option("--bits", type=int, help="Of each number of a key: 4 or 8 (fast).")
@click.option("--value-bits", type=int, help="Of each number of a value: 4 or 8 (fast).")
@click.option("--probes", type=int, help="Lists searched. Default: 16 (fast), 32 (ivfpq).")
@click.option("--rerank", is_flag=True, help="Keep the keys; true distances order candidates.")
@click.option("--similarity", help="To serve. Default: the memory's own.")
@click.option("--overwrite", is_flag=True, help="Replace an existing memory.")
@device_option
@json_option
def command(
    memory: str,
    output: Path,
    similarity: str | None,
    overwrite: bool,
    device: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write MEMORY anew with an index instead of its keys: small, and quick to search.

    \b
    knn-moe compress memory -o memory-fast
    knn-moe compress memory -o memory-ivfpq --index ivfpq --rerank
    knn-moe compress memory -o memory-small --dims 128

    What it costs in recall and in the confidence λ is measured on a sample of the keys and kept.
    """
    from knn_moe.adapt.compress import compress
    from knn_moe.config import IndexConfig
    from knn_moe.memory.files import refuse_existing
    from knn_moe.memory.memory import RoutingMemory

    refuse_existing(output, overwrite=overwrite)
    index = IndexConfig(**{name: value for name, value in options.items() if value is not None})
    opened = RoutingMemory.from_pretrained(memory)
    if similarity is not None:
        manifest = replace(opened.manifest, routing=replace(opened.routing, similarity=similarity))
        opened = replace(opened, manifest=manifest)
    done = 0

    def advance(layer: int) -> None:
        nonlocal done
        done += 1
        update(done, len(opened.layers), f"layer {layer}")

    with progress_bar("Compressing") as update:
        small = compress(
            opened,
            index,
            output,
            device=pick_device(device),
            overwrite=overwrite,
            on_layer=advance,
        )
    _show(opened, small, output, as_json)


def _show(whole: RoutingMemory, small: RoutingMemory, output: Path, as_json: bool) -> None:
    times = whole.nbytes / small.nbytes
    if as_json:
        facts = {"folder": str(output), "bytes": small.nbytes, "times_smaller": times}
        print_json({**facts, "layers": layer_facts(small)})
        return
    show_layers(small)
    log.print(
        f"{whole.nbytes / 1e6:,.1f} MB → {small.nbytes / 1e6:,.1f} MB "
        f"({times:.1f} times smaller) in {output}"
    )
