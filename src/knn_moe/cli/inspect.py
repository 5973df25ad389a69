"""`knn-moe inspect`: show what a memory contains."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.common import json_option, print_json, print_table

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
    from knn_moe.memory.summary import describe

    opened = RoutingMemory.from_pretrained(memory)
    if as_json:
        counts = {"cases": len(opened), "examples": opened.provenance.num_examples}
        facts = {**opened.manifest.to_dict(), **counts, "bytes": opened.nbytes}
        print_json({**facts, "layers": layer_facts(opened)})
        return
    print_table(memory, ("", ""), list(describe(opened).items()))
    show_layers(opened)


def show_layers(memory: RoutingMemory) -> None:
    """Print one row per layer, with the quality of the index if the memory is compressed."""
    cases = "prototypes" if memory.distilled else "cases"
    columns = ["layer", cases, "hidden", "experts", "keys", "γ", "typical distance"]
    columns += ["bytes per key"]
    if memory.compressed:
        columns += ["recall", "λ error"]
    if memory.routing.per_layer:
        columns += WIDTH_COLUMNS
    rows = []
    for layer in layer_facts(memory):
        row = [layer["layer"], layer[cases], layer["hidden_size"], layer["num_experts"]]
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
            "prototypes" if memory.distilled else "cases": len(layer),
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
