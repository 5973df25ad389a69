"""`knn-moe compress`: replace the keys of a memory by an index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.common import (
    device_option,
    json_option,
    output_option,
    overwrite_option,
    pick_given,
    print_json,
    print_note,
    show_progress,
)
from knn_moe.cli.inspect import layer_facts, show_layers
from knn_moe.routers.load import pick_device

if TYPE_CHECKING:
    from knn_moe.memory.memory import RoutingMemory

_CONFIG: Final = ("kind", "dims", "bits", "value_bits", "probes", "rerank")
_TAKES: Final = {
    "fast": ("dims", "bits", "value_bits", "probes", "rerank"),
    "ivfpq": ("dims", "probes", "rerank"),
    "faiss-flat": (),
}


@click.command(name="compress")
@click.argument("memory")
@output_option
@click.option(
    "--index",
    "kind",
    type=click.Choice(["fast", "ivfpq", "faiss-flat"]),
    default="fast",
    show_default=True,
    help="Search with this index. fast needs no further package; the others use FAISS.",
)
@click.option(
    "--dims",
    type=int,
    help="Project keys to this many dimensions. Default: an eighth, for fast at least 256.",
)
@click.option("--bits", type=int, help="Store each number of a key in 4 or 8 bits (fast only).")
@click.option(
    "--value-bits", type=int, help="Store each number of a value in 4 or 8 bits (fast only)."
)
@click.option(
    "--probes",
    type=int,
    help="Search this many lists of the index. Default: 16 for fast, 32 for ivfpq.",
)
@click.option(
    "--rerank", is_flag=True, help="Keep the keys too, and sort the candidates by true distance."
)
@click.option(
    "--similarity", help="Serve this similarity: rbf, rbf-unit or cosine. Default: the memory's."
)
@overwrite_option
@device_option
@json_option
def command(memory: str, output: Path, as_json: bool, **options: Any) -> None:
    """Write a copy of MEMORY that is small and fast to search.

    \b
    knn-moe compress memory -o memory-fast
    knn-moe compress memory -o memory-ivfpq --index ivfpq --rerank
    knn-moe compress memory -o memory-small --dims 128

    An index takes the place of the keys. The loss of recall and the error of the confidence (λ) are
    measured on a sample of the keys, printed, and stored in the new memory.
    """
    from knn_moe.adapt.compress import compress
    from knn_moe.config import IndexConfig
    from knn_moe.memory.files import refuse_existing
    from knn_moe.memory.memory import RoutingMemory

    overwrite, similarity = options["overwrite"], options["similarity"]
    refuse_existing(output, overwrite=overwrite)
    _check_combination(options)
    index = IndexConfig(**pick_given(options, *_CONFIG))
    opened = RoutingMemory.from_pretrained(memory)
    if similarity is not None:
        manifest = replace(opened.manifest, routing=replace(opened.routing, similarity=similarity))
        opened = replace(opened, manifest=manifest)
    device = pick_device(options["device"])
    with show_progress("Compressing") as report:
        small = compress(
            opened, index, output, device=device, overwrite=overwrite, on_progress=report
        )
    _show(opened, small, output, as_json)


def _check_combination(options: Mapping[str, Any]) -> None:
    """Refuse options that the chosen index has no use for."""
    kind, takes = options["kind"], _TAKES[options["kind"]]
    for name in pick_given(options, *_CONFIG):
        if name != "kind" and options[name] and name not in takes:
            raise click.UsageError(
                f"--{name.replace('_', '-')} has no effect on --index {kind}. Leave one out."
            )


def _show(whole: RoutingMemory, small: RoutingMemory, output: Path, as_json: bool) -> None:
    times = whole.nbytes / small.nbytes
    if as_json:
        facts = {"folder": str(output), "bytes": small.nbytes, "times_smaller": times}
        print_json({**facts, "layers": layer_facts(small)})
        return
    show_layers(small)
    print_note(
        f"{whole.nbytes / 1e6:,.1f} MB → {small.nbytes / 1e6:,.1f} MB "
        f"({times:.1f} times smaller) in {output}"
    )
