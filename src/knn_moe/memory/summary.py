"""A memory in words: for people who look at it in a terminal or in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from knn_moe.config import RoutingConfig
from knn_moe.memory.card import describe_head
from knn_moe.support.summary_table import SummaryTable

if TYPE_CHECKING:
    from knn_moe.memory.memory import RoutingMemory

_SHORT: Final = ("control", "cases per layer", "examples", "layers", "size", "used with")
_IF_ANY: Final = ("head", "calibrated", "distilled", "pruned")


def summary_table(memory: RoutingMemory) -> SummaryTable:
    """Return the most important facts, as a notebook shows them."""
    facts = describe(memory)
    shown = [*_SHORT, *(name for name in _IF_ANY if facts.get(name, "no") != "no")]
    rows = [(name, facts[name]) for name in shown if name in facts]
    title = f"Routing memory for {memory.base_model.name}"
    return SummaryTable(title=title, rows=rows, texts=2)


def describe(memory: RoutingMemory) -> dict[str, str]:
    """Return what there is to know of the whole memory, as texts by name."""
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
        "layers": f"{len(memory.layers)}{memory.form}",
        "size": f"{memory.nbytes / 1e6:,.1f} MB",
        "built with": _join(manifest["build"]),
        "used with": _join(routing),
        "head": _describe_head(memory),
        "distilled" if memory.distilled else "calibrated": _describe_calibration(
            manifest["calibration"]
        ),
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
