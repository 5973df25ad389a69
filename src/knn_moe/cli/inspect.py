"""`knn-moe inspect`: what a memory holds and whose it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import json_option, print_json, print_table

if TYPE_CHECKING:
    from knn_moe.memory import RoutingMemory


@click.command(name="inspect")
@click.argument("memory")
@json_option
def command(memory: str, as_json: bool) -> None:
    """Show what MEMORY (a folder or a hub id) holds and whose it is.

    \b
    knn-moe inspect memory
    knn-moe inspect memory --json

    Reads every file once and compares its checksum.
    """
    from knn_moe.memory import RoutingMemory

    opened = RoutingMemory.from_pretrained(memory)
    if as_json:
        numbers = {"cases": len(opened), "examples": opened.provenance.num_examples}
        facts = {**opened.header.to_dict(), **numbers, "bytes": opened.nbytes}
        print_json({**facts, "layers": _layers(opened)})
        return
    print_table(memory, ("", ""), list(_facts(opened).items()))
    columns = ("layer", "cases", "hidden", "experts", "keys", "γ", "typical distance")
    rows = [
        (*list(layer.values())[:-1], f"{layer['gamma']:.4g}", f"{layer['gamma'] ** -0.5:.4g}")
        for layer in _layers(opened)
    ]
    print_table("layers", columns, rows)


def _facts(memory: RoutingMemory) -> dict[str, str]:
    header = memory.header.to_dict()
    return {
        "base model": memory.base_model.name,
        "revision": memory.base_model.revision or "-",
        "routers": f"{memory.base_model.architecture} {memory.base_model.fingerprint[:12]}",
        "cases per layer": f"{len(memory):,}",
        "examples": f"{memory.provenance.num_examples:,}",
        "size": f"{memory.nbytes / 1e6:,.1f} MB",
        "built with": _settings(header["build"]),
        "used with": _settings(header["routing"]),
        "libraries": _settings(header["libraries"]),
    }


def _layers(memory: RoutingMemory) -> list[dict[str, Any]]:
    return [
        {
            "layer": index,
            "cases": len(layer.keys),
            "hidden_size": layer.shape.hidden_size,
            "num_experts": layer.shape.num_experts,
            "dtype": str(layer.keys.dtype).removeprefix("torch."),
            "gamma": layer.gamma,
        }
        for index, layer in memory.layers.items()
    ]


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
