"""`knn-moe inspect`: what a memory holds and whose it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.common import json_option, print_json, print_table

if TYPE_CHECKING:
    from knn_moe.config import LayerRouting
    from knn_moe.memory.memory import RoutingMemory

KERNEL_COLUMNS: Final = ("γ × to weigh", "γ × for λ", "confidence_factor")


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
    from knn_moe.memory.memory import RoutingMemory

    opened = RoutingMemory.from_pretrained(memory)
    if as_json:
        numbers = {"cases": len(opened), "examples": opened.provenance.num_examples}
        facts = {**opened.manifest.to_dict(), **numbers, "bytes": opened.nbytes}
        if opened.provenance.num_domains > 1:
            facts["domains"] = [{"cases": cases} for cases in opened.provenance.cases_of_domain]
        print_json({**facts, "layers": layer_facts(opened)})
        return
    print_table(memory, ("", ""), list(_facts(opened).items()))
    show_layers(opened)


def show_layers(memory: RoutingMemory) -> None:
    """One row a layer; of a compressed one also what an index made of its keys, and how well."""
    columns = [
        "layer",
        "cases",
        "hidden",
        "experts",
        "keys",
        "γ",
        "typical distance",
        "bytes a key",
    ]
    kernels = {kernel.layer: kernel for kernel in memory.routing.per_layer}
    several = memory.provenance.num_domains > 1
    if several:
        columns += ["γ by domain"]
    if memory.compressed:
        columns += ["recall", "λ error"]
    if kernels:
        columns += KERNEL_COLUMNS
    rows = []
    for layer in layer_facts(memory):
        row = [layer["layer"], layer["cases"], layer["hidden_size"], layer["num_experts"]]
        row += [layer.get("index", {}).get("kind", layer["dtype"]), f"{layer['gamma']:.4g}"]
        row += [f"{layer['gamma'] ** -0.5:.4g}", f"{layer['bytes_per_case']:.1f}"]
        if several:
            row += [" ".join(f"{gamma:.4g}" for gamma in layer["gammas"])]
        if "quality" in layer:
            quality = layer["quality"]
            row += [f"{quality['recall']:.3f}", f"{quality['confidence_error']:.4f}"]
        if kernels:
            row += kernel_cells(memory.routing.for_layer(layer["layer"]))
        rows.append(tuple(row))
    print_table("layers", tuple(columns), rows)


def kernel_cells(kernel: LayerRouting) -> list[str]:
    """One for each of KERNEL_COLUMNS."""
    widths = [f"{width:.3g}" for width in (kernel.gamma_scale, kernel.confidence_scale)]
    return [*widths, f"{kernel.confidence_factor:.2f}"]


def layer_facts(memory: RoutingMemory) -> list[dict[str, Any]]:
    from knn_moe.memory.compressed import CompressedLayer
    from knn_moe.memory.writer import gamma_entry

    facts = []
    for index, layer in memory.layers.items():
        fact: dict[str, Any] = {
            "layer": index,
            "cases": len(layer),
            "hidden_size": layer.shape.hidden_size,
            "num_experts": layer.shape.num_experts,
            "dtype": str(layer.shape.dtype).removeprefix("torch."),
            **gamma_entry(layer.gamma, layer.gammas),
            "bytes_per_case": layer.nbytes / max(len(layer), 1),
        }
        if isinstance(layer, CompressedLayer):
            fact |= {"index": layer.index.to_dict(), "quality": asdict(layer.quality)}
        facts.append(fact)
    return facts


def _facts(memory: RoutingMemory) -> dict[str, str]:
    from knn_moe.config import RoutingConfig

    manifest, usual = memory.manifest.to_dict(), RoutingConfig().to_dict()
    del manifest["routing"]["per_layer"]  # shown layer by layer
    told = ("k", "similarity")  # the rest only where it is not as usual
    routing = {
        name: value
        for name, value in manifest["routing"].items()
        if name in told or value != usual[name]
    }
    return {
        "base model": memory.base_model.name,
        "revision": memory.base_model.revision or "-",
        "routers": f"{memory.base_model.architecture} {memory.base_model.fingerprint[:12]}",
        "cases per layer": f"{len(memory):,}",
        "examples": f"{memory.provenance.num_examples:,}",
        "domains": _domains(memory),
        "size": f"{memory.nbytes / 1e6:,.1f} MB",
        "built with": _settings(manifest["build"]),
        "used with": _settings(routing),
        "calibrated": _calibration(manifest["calibration"]),
        "pruned": _pruning(manifest["pruned"]),
        "libraries": _settings(manifest["libraries"]),
    }


def _domains(memory: RoutingMemory) -> str:
    from knn_moe.memory.card import domains_in_words

    if memory.provenance.num_domains == 1:
        return "1"
    gammas = [layer.gammas for layer in memory.layers.values()]
    return domains_in_words(memory.provenance.cases_of_domain, gammas)


def _calibration(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no"
    change = found["change"]
    return (
        f"{change['difference']:+.4f} nats a token ({change['low']:+.4f} to {change['high']:+.4f}) "
        f"on {found['examples']} examples{'' if found['helps'] else ': silent'}"
    )


def _pruning(found: dict[str, Any] | None) -> str:
    return f"{found['kept']:,} of {found['cases']:,} cases, by {found['score']}" if found else "no"


def _settings(values: dict[str, Any]) -> str:
    flat = {
        **{name: value for name, value in values.items() if not isinstance(value, dict)},
        **{
            f"{outer} {name}": value
            for outer, inner in values.items()
            if isinstance(inner, dict)
            for name, value in inner.items()
        },
    }
    return ", ".join(f"{name} {value}" for name, value in flat.items() if value is not None)
