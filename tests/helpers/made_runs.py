"""Runs as `evaluate` stores them, with scores made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from knn_moe.evaluation.store import Run, RunFolder
from knn_moe.tasks.sample import Sample


def make_run(method: str, scores: Sequence[float], task: str = "quiz", **facts: Any) -> Run:
    """Return a run by likelihood of questions whose number of choices is not known."""
    samples = [
        Sample(id=f"{place:03}", prompt="p", score=score, nll=2.0 + place / 100, batch=0,
               parsed="A", margin=0.5)
        for place, score in enumerate(scores)
    ]  # fmt: skip
    known = {"task": task, "title": task, "method": method, "scoring": "likelihood", "asked": "x"}
    known |= {"data": "", "device": "cpu", "dtype": "float32"}
    more = {"finished": True, "seconds": 1.0, "model": {"name": "m"}, "method_facts": {}}
    more["note"] = "Nothing of note."
    return Run({**known, **more, **facts}, samples)


def generated_run(
    method: str,
    right: int,
    unparsed: int,
    items: int = 60,
    choices: int | None = 4,
    task: str = "quiz",
) -> Run:
    """Return a run by generation: first the right answers, then wrong ones, then no answers."""
    run = make_run(method, [1.0] * right + [0.0] * (items - right), task, scoring="generation")
    parsed = ["A"] * (items - unparsed) + [None] * unparsed
    samples = [
        replace(sample, parsed=letter, choices=choices, margin=None, output="…")
        for sample, letter in zip(run.samples, parsed, strict=True)
    ]
    return Run(run.facts, samples)


def likely_run(method: str, scores: Sequence[float], counts: Sequence[int], task: str) -> Run:
    """Return a run by likelihood of questions with these numbers of choices."""
    run = make_run(method, scores, task)
    samples = [
        replace(sample, likelihoods=(-1.0,) * count, answer="A")
        for sample, count in zip(run.samples, counts, strict=True)
    ]
    return Run(run.facts, samples)


def write_runs(folder: Path, runs: Sequence[Run]) -> Path:
    """Write runs as `knn-moe eval` does, and return the folder."""
    for run in runs:
        place = RunFolder(folder / run.task / run.method)
        place.begin({**run.facts, "batches": [len(run.samples)]}, resume=False, overwrite=False)
        place.append(run.samples)
        place.finish(1.0, {})
    return folder
