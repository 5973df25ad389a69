"""Which tables there are, and how one or all of them are made.

A table that is on disk already is read, not made again; its runs are shared with other tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Final

import torch

from knn_moe.errors import ConfigError, KnnMoeError
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
    "seeds": Entry("Random seeds", "Table 14", sweeps.seeds),
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

    First all runs of one model, task by task, then of the next: a model is loaded once. What fails
    does not keep the other tables from being made; the first failure is raised at the end.
    """
    names = chosen_tables(names)
    study.check()
    missing = [name for name in names if read_table(study.folder, name) is None]
    if missing:
        _make_runs(study, missing)
    failures = []
    for name in names:
        try:
            yield _table(study, name)
        except KnnMoeError as error:
            failures.append(error)
    tables = (read_table(study.folder, name) for name in TABLES)
    whole = [table for table in tables if table is not None]
    if whole:
        write_page(whole, study.folder)
    if failures:
        raise failures[0]


def _make_runs(study: Study, names: Sequence[str]) -> None:
    """Everything the tables are made of; in several processes, a model and task for each, where
    the study has jobs. What fails here fails again, and is told, when its table is made."""
    units = list(product(study.plan.models, study.plan.tasks))
    if study.jobs == 1:
        for unit in units:
            _make_unit(study, unit, names)
        return
    # The longest first: no process is left alone with it at the end.
    units.sort(key=lambda unit: study.length(unit[1]), reverse=True)
    threads = max(1, torch.get_num_threads() // study.jobs)
    with ProcessPoolExecutor(study.jobs, get_context("spawn"), _begin, (threads,)) as pool:
        bare = replace(study, on_step=_silent, _loaded={}, _data={}, _contexts={})
        waiting = [pool.submit(_make_unit, bare, unit, names) for unit in units]
        for count, done in enumerate(as_completed(waiting), start=1):
            done.result()
            study.on_step("models and tasks", count, len(units))


def _begin(threads: int) -> None:
    """In each process: its share of the threads, and an end when the study's own process ends."""
    torch.set_num_threads(threads)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed study's processes would go on, and write into a folder that may be another's."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make_unit(study: Study, unit: tuple[str, str], names: Sequence[str]) -> None:
    part = study.of(*unit)
    for name in names:
        with suppress(KnnMoeError):
            TABLES[name].make(part)


def _silent(what: str, done: int, total: int) -> None:
    pass


def _table(study: Study, name: str) -> Table:
    known = read_table(study.folder, name)
    if known is not None:
        return known
    table = replace(TABLES[name].make(study), paper=PAPER[name])
    write_table(table, study.folder)
    return table
