"""`knn-moe inspect`: show what a memory contains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.common import json_option, print_json, print_table
from knn_moe.memory.card import describe_head

if TYPE_CHECKING:
    from knn_moe.config import LayerRouting
    from knn_moe.memory.memory import RoutingMemory

WIDTH_COLUMNS: Final = ("γ scale", "λ scale", "λ factor")


@click.command(name="inspect")
@click.argument("memory")
@json_option
def command(memory: str, as_json: bool) -> None:
    """Show what MEMORY contains and which model it belongs to.

    \b
    knn-moe inspect memory
    knn-moe inspect memory --json

    MEMORY is a folder or a hub id. Every file is read once to verify its checksum and its contents.
    For each layer the table shows the width γ and the distance at which a case has a similarity of
    1/e (typical distance). A calibrated memory also has a factor of γ for the weights of neighbours
    (γ scale), a factor of γ for the confidence λ (λ scale), and a factor of λ itself (λ factor).
    """
    from knn_moe.memory.memory import RoutingMemory

    opened = RoutingMemory.from_pretrained(memory)
    if as_json:
        counts = {"cases": len(opened), "examples": opened.provenance.num_examples}
        facts = {**opened.manifest.to_dict(), **counts, "bytes": opened.nbytes}
        print_json({**facts, "layers": layer_facts(opened)})
        return
    print_table(memory, ("", ""), list(_describe(opened).items()))
    show_layers(opened)


def show_layers(memory: RoutingMemory) -> None:
    """Print one row per layer, with the quality of the index if the memory is compressed."""
    columns = ["layer", "cases", "hidden", "experts", "keys", "γ", "typical distance"]
    columns += ["bytes per key"]
    if memory.compressed:
        columns += ["recall", "λ error"]
    if memory.routing.per_layer:
        columns += WIDTH_COLUMNS
    rows = []
    for layer in layer_facts(memory):
        row = [layer["layer"], layer["cases"], layer["hidden_size"], layer["num_experts"]]
        row += [layer.get("index", {}).get("kind", layer["dtype"]), f"{layer['gamma']:.4g}"]
        row += [f"{layer['gamma'] ** -0.5:.4g}", f"{layer['bytes_per_case']:.1f}"]
        if "quality" in layer:
            quality = layer["quality"]
            row += [f"{quality['recall']:.3f}", f"{quality['confidence_error']:.4f}"]
        if memory.routing.per_layer:
            row += width_cells(memory.routing.for_layer(layer["layer"]))
        rows.append(row)
    print_table("Layers", columns, rows)


def width_cells(routing: LayerRouting) -> list[str]:
    """Return one cell for each of WIDTH_COLUMNS."""
    scales = [f"{scale:.3g}" for scale in (routing.gamma_scale, routing.confidence_scale)]
    return [*scales, f"{routing.confidence_factor:.2f}"]


def layer_facts(memory: RoutingMemory) -> list[dict[str, Any]]:
    """Return the shape, width and size of each layer, as JSON takes them."""
    from knn_moe.memory.compressed import CompressedLayer

    facts = []
    for index, layer in memory.layers.items():
        fact: dict[str, Any] = {
            "layer": index,
            "cases": len(layer),
            "hidden_size": layer.shape.hidden_size,
            "num_experts": layer.shape.num_experts,
            "dtype": str(layer.shape.dtype).removeprefix("torch."),
            "gamma": layer.gamma,
            "bytes_per_case": layer.nbytes / max(len(layer), 1),
        }
        if isinstance(layer, CompressedLayer):
            fact |= {"index": layer.index.to_dict(), "quality": asdict(layer.quality)}
        facts.append(fact)
    return facts


def _describe(memory: RoutingMemory) -> dict[str, str]:
    from knn_moe.config import RoutingConfig

    manifest, usual = memory.manifest.to_dict(), RoutingConfig().to_dict()
    # `per_layer` is shown in the table of layers; the other fields only where they differ.
    routing = {
        name: value
        for name, value in manifest["routing"].items()
        if name in ("k", "similarity") or (name != "per_layer" and value != usual[name])
    }
    seed = memory.manifest.random_seed
    return {
        **({} if seed is None else {"control": f"recalls cases at random, seed {seed}"}),
        "base model": memory.base_model.name,
        "revision": memory.base_model.revision or "-",
        "routers": f"{memory.base_model.architecture} {memory.base_model.fingerprint[:12]}",
        "cases per layer": f"{len(memory):,}",
        "examples": f"{memory.provenance.num_examples:,}",
        "size": f"{memory.nbytes / 1e6:,.1f} MB",
        "built with": _join(manifest["build"]),
        "used with": _join(routing),
        "head": _describe_head(memory),
        "calibrated": _describe_calibration(manifest["calibration"]),
        "pruned": _describe_pruning(manifest["pruned"]),
        "libraries": _join(manifest["libraries"]),
    }


def _describe_head(memory: RoutingMemory) -> str:
    head, stored = memory.routing.head, memory.head_keys
    if head is None:
        return "no"
    size = f"; its keys take {stored.nbytes / 1e6:,.1f} MB" if stored else ""
    return f"predicts next tokens {describe_head(asdict(head))}{size}"


def _describe_calibration(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no"
    change = found["change"]
    interval = f"{change['low']:+.4f} to {change['high']:+.4f}"
    state = "" if found["helps"] else "; routing is turned off"
    head = found.get("head")
    if head and head.get("helps"):
        total = f"{head['change']['difference']:+.4f}"
        state += f"; with its head {total}"
    return (
        f"{change['difference']:+.4f} nats per token ({interval}) on {found['examples']} "
        f"held-out examples{state}"
    )


def _describe_pruning(found: dict[str, Any] | None) -> str:
    return f"{found['kept']:,} of {found['cases']:,} cases, by {found['score']}" if found else "no"


def _join(values: Mapping[str, Any], before: str = "") -> str:
    """Return "name value, outer name value" for all values that are set."""
    parts = [
        _join(value, f"{name} ") if isinstance(value, dict) else f"{before}{name} {value}"
        for name, value in values.items()
        if value is not None
    ]
    return ", ".join(parts)
