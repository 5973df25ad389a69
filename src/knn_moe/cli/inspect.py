"""`knn-moe inspect`: what a memory holds and whose it is."""

from __future__ import annotations

from typing import Any

import click

from knn_moe.cli.common import json_option, print_json, print_table


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
    header = opened.header.to_dict()
    facts = {
        "base model": opened.base_model.name,
        "revision": opened.base_model.revision or "-",
        "routers": f"{opened.base_model.architecture} {opened.base_model.fingerprint[:12]}",
        "cases per layer": f"{len(opened):,}",
        "examples": f"{opened.provenance.num_examples:,}",
        "size": f"{opened.nbytes / 1e6:,.1f} MB",
        "built with": _settings(header["build"]),
        "used with": _settings(header["routing"]),
        "libraries": _settings(header["libraries"]),
    }
    layers: list[dict[str, Any]] = [
        {
            "layer": index,
            "cases": len(layer.keys),
            "hidden_size": layer.shape.hidden_size,
            "num_experts": layer.shape.num_experts,
            "dtype": str(layer.keys.dtype).removeprefix("torch."),
            "gamma": layer.gamma,
        }
        for index, layer in opened.layers.items()
    ]
    if as_json:
        numbers = {"cases": len(opened), "examples": opened.provenance.num_examples}
        print_json({**header, **numbers, "bytes": opened.nbytes, "layers": layers})
        return
    print_table(str(memory), ("", ""), list(facts.items()))
    columns = ("layer", "cases", "hidden", "experts", "keys", "γ", "typical distance")
    rows = [
        (
            layer["layer"],
            f"{layer['cases']:,}",
            layer["hidden_size"],
            layer["num_experts"],
            layer["dtype"],
            f"{layer['gamma']:.4g}",
            f"{layer['gamma'] ** -0.5:.4g}",
        )
        for layer in layers
    ]
    print_table("layers", columns, rows)


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
