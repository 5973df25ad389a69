"""Which tables there are, and how one or all of them are made.

A table that is on disk already is read, not made again; its runs are shared with other tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final

from knn_moe.errors import ConfigError
from knn_moe.reproduce import costs, results, sweeps
from knn_moe.reproduce.paper import PAPER
from knn_moe.reproduce.study import Study
from knn_moe.reproduce.table import Table
from knn_moe.reproduce.write import read_table, write_page, write_table

ALL: Final = "all"


@dataclass(frozen=True)
class Entry:
    """A table of the paper: what it is called there, and who makes it here."""

    title: str
    where: str
    make: Callable[[Study], Table]
    first_only: bool = False  # of the first model alone


TABLES: Final = {
    "main": Entry("Main results", "Table 1", results.main),
    "perplexity": Entry("Gains by perplexity", "Table 2", results.perplexity),
    "selective": Entry("Selective", "Table 3", results.selective),
    "reference-size": Entry("Reference set size", "Table 4", sweeps.reference_size),
    "neighbours": Entry("Number of neighbours K", "Table 5", sweeps.neighbours),
    "steps": Entry("Gradient descent steps S", "Table 6", sweeps.steps),
    "construction-time": Entry("Construction time", "Table 7", costs.construction_time),
    "inference-speed": Entry("Inference speed", "Table 8", costs.inference_speed),
    "memory-use": Entry("VRAM", "Table 9", costs.memory_use),
    "c3po": Entry("Comparison with C3PO", "Table 10", results.c3po),
    "load-balancing": Entry("Load balancing", "Table 11", results.load_balancing),
    "similarity": Entry("Similarity functions", "Table 12", sweeps.similarity),
    "top1-share": Entry("Share of the nearest", "Table 13", sweeps.top1_share),
    "seeds": Entry("Random seeds", "Table 14", sweeps.seeds, first_only=True),
}


def chosen_tables(names: Sequence[str]) -> list[str]:
    """The names, checked; `all` for every one, in the paper's order."""
    if ALL in names:
        return list(TABLES)
    for name in names:
        if name not in TABLES:
            meant = get_close_matches(name, TABLES, n=1)
            hint = f" Did you mean {meant[0]!r}?" if meant else ""
            raise ConfigError(
                f"Unknown table {name!r}.{hint} Available: {', '.join((*TABLES, ALL))}."
            )
    return list(dict.fromkeys(names))


def reproduce(study: Study, names: Sequence[str]) -> Iterator[Table]:
    """Tables as they are done, each written to the study's folder.

    First all runs of one model, then of the next: a model is loaded once.
    """
    names = chosen_tables(names)
    study.begin()
    missing = [name for name in names if read_table(study.folder, name) is None]
    for model in study.models:
        part = study.of(model)
        for name in missing:
            if not TABLES[name].first_only or model == study.models[0]:
                TABLES[name].make(part)
    made = []
    for name in names:
        made.append(_table(study, name))
        yield made[-1]
    write_page(made, study.folder)


def _table(study: Study, name: str) -> Table:
    known = read_table(study.folder, name)
    if known is not None:
        return known
    entry = TABLES[name]
    made = entry.make(study.of(study.models[0]) if entry.first_only else study)
    table = replace(made, paper=PAPER[name])
    write_table(table, study.folder)
    return table
