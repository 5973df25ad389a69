"""Make the runs of a study in several processes, which may share one GPU.

Preparing a method is many small operations: one process leaves most of a large GPU idle. Each
process loads the model for itself and works one group of runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context

import torch

from knn_moe.evaluation.store import Run
from knn_moe.reproduce.pretrained.plan import RunSpec
from knn_moe.reproduce.pretrained.study import Group, PretrainedStudy
from knn_moe.support.processes import end_with_parent
from knn_moe.support.progress import Progress, ignore_progress

_study: PretrainedStudy  # of a process that makes runs


def make_runs_in_processes(
    study: PretrainedStudy, jobs: int, deadline: float | None = None
) -> Iterator[tuple[RunSpec, Run]]:
    """Make the missing runs in `jobs` processes, and yield each group's runs when it is done.

    Args:
        study: What to run; `load` must be picklable. Failures are added to its own.
        jobs: The number of processes.
        deadline: As in `PretrainedStudy.make_runs`.
    """
    groups = study.missing_groups()
    threads = max(1, torch.get_num_threads() // jobs)
    bare = replace(study, on_progress=ignore_progress, failures=[], _loaded={}, _data={}, _asked={})
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (bare, threads)) as pool:
        waiting = [pool.submit(_make_group, group, deadline) for group in groups]
        for count, done in enumerate(as_completed(waiting), start=1):
            runs, failures = done.result()
            study.failures += failures
            study.on_progress(Progress("groups of runs", count, len(groups)))
            yield from runs


def _begin(study: PretrainedStudy, threads: int) -> None:
    global _study
    _study = study
    torch.set_num_threads(threads)
    end_with_parent()


def _make_group(
    group: Group, deadline: float | None
) -> tuple[list[tuple[RunSpec, Run]], list[str]]:
    _study.failures.clear()
    return list(_study.make_group(group, deadline)), list(_study.failures)
