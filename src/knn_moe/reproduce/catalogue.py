"""Every table of the paper by name: its title, its number, and the function that makes it.

Imports none of these functions, so that tables can be listed without waiting for torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from knn_moe.support.registry import Registry

if TYPE_CHECKING:
    from knn_moe.reproduce.study import Study
    from knn_moe.reproduce.table import Table

ALL: Final = "all"


@dataclass(frozen=True)
class TableSpec:
    """A table of the paper: its title, its number there, and "module:function" that makes it."""

    title: str
    number: str
    function: str
    questions: bool = False  # whether it needs a task that is not plain text

    def make(self, study: Study) -> Table:
        """Import the function and make the table of a study."""
        module, _, function = self.function.partition(":")
        table: Table = getattr(import_module(f"knn_moe.reproduce.{module}"), function)(study)
        return table


TABLES: Final = Registry(
    "table",
    {
        "main": TableSpec("Main results", "Table 1", "results:main"),
        "perplexity": TableSpec("Gains by perplexity", "Table 2", "results:perplexity"),
        "selective": TableSpec("Selective", "Table 3", "results:selective"),
        "reference-size": TableSpec("Reference set size", "Table 4", "sweeps:reference_size"),
        "neighbours": TableSpec("Number of neighbours K", "Table 5", "sweeps:neighbours"),
        "steps": TableSpec("Gradient descent steps S", "Table 6", "sweeps:steps"),
        "construction-time": TableSpec("Construction time", "Table 7", "costs:construction_time"),
        "inference-speed": TableSpec("Inference speed", "Table 8", "costs:inference_speed"),
        "memory-use": TableSpec("VRAM", "Table 9", "costs:memory_use"),
        "c3po": TableSpec("Comparison with C3PO", "Table 10", "results:c3po", questions=True),
        "load-balancing": TableSpec("Load balancing", "Table 11", "results:load_balancing"),
        "similarity": TableSpec("Similarity functions", "Table 12", "sweeps:similarity"),
        "top1-share": TableSpec("Share of the nearest", "Table 13", "sweeps:top1_share"),
        "seeds": TableSpec("Random seeds", "Table 14", "sweeps:seeds"),
    },
)


def choose_tables(names: Sequence[str]) -> list[str]:
    """Return the names, each once; every table in the paper's order if `all` is among them.

    Raises:
        ConfigError: There is no table of that name.
    """
    if ALL in names:
        return list(TABLES)
    for name in names:
        TABLES.find(name, f" Or {ALL} of them.")
    return list(dict.fromkeys(names))
