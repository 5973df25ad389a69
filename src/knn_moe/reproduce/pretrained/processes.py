"""Make the runs of a study in several processes, which may share one GPU.

Preparing a method is many small operations: one process leaves most of a large GPU idle. Each
process loads the model for itself and works one group of runs at a time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import NamedTuple

import torch

from knn_moe.evaluation.store import Run
from knn_moe.reproduce.pretrained.plan import RunSpec
from knn_moe.reproduce.pretrained.study import Group, PretrainedStudy
from knn_moe.support.processes import end_with_parent, process_pool
from knn_moe.support.progress import Progress, ignore_progress

_study: PretrainedStudy  # of a process that makes runs


def make_runs_in_processes(
    study: PretrainedStudy, jobs: int, deadline: float | None = None
) -> Iterator[tuple[RunSpec, Run]]:
    """Make the missing runs in `jobs` processes, and yield each group's runs when it is done.

    If some did not fit in memory beside the others, half as many processes try them again.

    Args:
        study: What to run; `load` must be picklable. Failures are added to its own.
        jobs: The number of processes.
        deadline: As in `PretrainedStudy.make_runs`.
    """
    while True:
        study.crowded, before = False, len(study.failures)
        yield from _make_once(study, jobs, deadline)
        late = deadline is not None and time.monotonic() >= deadline
        if jobs == 1 or not study.crowded or late:
            return
        jobs //= 2
        del study.failures[before:]


def _make_once(
    study: PretrainedStudy, jobs: int, deadline: float | None
) -> Iterator[tuple[RunSpec, Run]]:
    groups = study.missing_groups()
    threads = max(1, torch.get_num_threads() // jobs)
    bare = replace(study, on_progress=ignore_progress, failures=[], _loaded={}, _data={}, _asked={})
    with process_pool(jobs, _begin, bare, threads) as pool:
        waiting = [pool.submit(_make_group, group, deadline) for group in groups]
        for count, done in enumerate(as_completed(waiting), start=1):
            try:
                made = done.result()
            except BrokenProcessPool:
                study.failures.append("a process was killed, perhaps for want of memory")
                study.crowded = True
                return
            study.failures += made.failures
            study.crowded |= made.crowded
            study.on_progress(Progress("groups of runs", count, len(groups)))
            yield from made.runs


class _Made(NamedTuple):
    """What became of a group."""

    runs: list[tuple[RunSpec, Run]]
    failures: list[str]
    crowded: bool


def _begin(study: PretrainedStudy, threads: int) -> None:
    global _study
    _study = study
    torch.set_num_threads(threads)
    end_with_parent()


def _make_group(group: Group, deadline: float | None) -> _Made:
    _study.failures, _study.crowded = [], False
    runs = list(_study.make_group(group, deadline))
    gc.collect()
    if _study.device.type == "cuda":
        torch.cuda.empty_cache()  # which other processes may need
    return _Made(runs, _study.failures, _study.crowded)
