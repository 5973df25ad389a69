"""The tables of the paper, and how they are made again.

A table that is on disk already is read, not made again. Tables share their runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from itertools import product

import torch

from knn_moe.errors import ConfigError, KnnMoeError, RunError
from knn_moe.reproduce.catalogue import ALL, TABLES, choose_tables
from knn_moe.reproduce.paper import PAPER
from knn_moe.reproduce.study import Study
from knn_moe.reproduce.table import Table
from knn_moe.reproduce.write import read_table, write_all_tables, write_table
from knn_moe.support.processes import end_with_parent, process_pool
from knn_moe.support.progress import Progress, ignore_progress
from knn_moe.tasks.sandbox import check_programs


def reproduce(study: Study, names: Sequence[str]) -> Iterator[Table]:
    """Make tables, write each to the study's folder and yield it.

    All runs of one model come before those of the next, so that each model is loaded once. A table
    that fails does not keep the others from being made: the first failure is raised at the end.

    Args:
        study: The plan, and where its runs are.
        names: Of tables; "all" means all that the study's tasks allow.

    Raises:
        KnnMoeError: A name, a task or the folder does not fit the study, or a table failed.
    """
    chosen = choose_tables(names)
    study.check()
    if all(map(study.is_text, study.plan.tasks)):
        impossible = [name for name in chosen if TABLES[name].questions]
        if impossible and ALL not in names:
            raise ConfigError(
                f"The table {impossible[0]!r} needs a task with questions, and every task of this "
                f"study is plain text. Add such a task, or leave out the table."
            )
        chosen = [name for name in chosen if name not in impossible]
    names = chosen
    missing = [name for name in names if read_table(study.folder, name) is None]
    if missing:
        check_programs(study.data(task).task for task in study.plan.tasks)
        _make_runs(study, missing)
    failures = []
    for name in names:
        try:
            yield _make_table(study, name)
        except KnnMoeError as error:
            failures.append(error)
    tables = (read_table(study.folder, name) for name in TABLES)
    finished = [table for table in tables if table is not None]
    if finished:
        write_all_tables(finished, study.folder)
    if failures:
        raise failures[0]


def _make_runs(study: Study, names: Sequence[str]) -> None:
    """Make every run the tables need, in as many processes as the study has jobs.

    A run that fails here fails again, and is reported, when its table is made.
    """
    pairs = list(product(study.plan.models, study.plan.tasks))
    if study.jobs == 1:
        for model, task in pairs:
            _make_runs_of(study, model, task, names)
        return
    # The longest first: otherwise one process may work on it alone at the end.
    pairs.sort(key=lambda pair: study.reference_length(pair[1]), reverse=True)
    threads = max(1, torch.get_num_threads() // study.jobs)
    with process_pool(study.jobs, _begin, threads) as pool:
        bare = replace(study, on_progress=ignore_progress, _loaded={}, _data={}, _contexts={})
        waiting = [pool.submit(_make_runs_of, bare, *pair, names) for pair in pairs]
        for count, done in enumerate(as_completed(waiting), start=1):
            try:
                done.result()
            except BrokenProcessPool:
                raise RunError(
                    f"One of {study.jobs} processes was killed, perhaps for want of memory. The "
                    f"same command continues; with fewer --jobs, choose another folder."
                ) from None
            study.on_progress(Progress("models and tasks", count, len(pairs)))


def _begin(threads: int) -> None:
    """Set up a process: its share of the threads, and an end with the study's own process.

    The processes of a killed study would otherwise write on, into a folder that may be another
    study's by then.
    """
    torch.set_num_threads(threads)
    end_with_parent()


def _make_runs_of(study: Study, model: str, task: str, names: Sequence[str]) -> None:
    part = study.restrict(model, task)
    for name in names:
        with suppress(KnnMoeError):
            TABLES[name].make(part)


def _make_table(study: Study, name: str) -> Table:
    table = read_table(study.folder, name)
    if table is None:
        table = replace(TABLES[name].make(study), paper=PAPER[name])
        write_table(table, study.folder)
    return table
