"""Results on disk: a folder for each task and method, written batch by batch.

RUNS/TASK/METHOD/run.json says what was measured and whether it is whole; samples.jsonl has a line
for each question. Samples are appended a batch at a time, so a killed run goes on with the next.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from knn_moe.errors import RunError
from knn_moe.support.files import write_whole
from knn_moe.tasks.sample import Sample

FORMAT: Final = 1
_RUN: Final = "run.json"
_SAMPLES: Final = "samples.jsonl"


@dataclass(frozen=True)
class Run:
    """What was measured, and every sample of it."""

    facts: Mapping[str, Any]
    samples: list[Sample]

    @property
    def task(self) -> str:
        return str(self.facts["task"])

    @property
    def method(self) -> str:
        return str(self.facts["method"])


class RunFolder:
    """One run while it is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, facts: Mapping[str, Any], *, resume: bool, overwrite: bool) -> list[Sample]:
        """Samples that are there already, of whole batches; none for a new run."""
        if overwrite and self.path.exists():
            shutil.rmtree(self.path)
        if not (self.path / _RUN).exists():
            self.path.mkdir(parents=True, exist_ok=True)
            self._write({"format": FORMAT, "finished": False, **facts})
            (self.path / _SAMPLES).write_text("", encoding="utf8")
            return []
        if not resume:
            self.refuse_existing()
        return self._go_on(facts)

    def refuse_existing(self) -> None:
        """Before anything is prepared for a run that could not be written."""
        if (self.path / _RUN).exists():
            raise RunError(
                f"There is a run in {str(self.path)!r} already: go on with --resume, or replace it "
                f"with --overwrite."
            )

    def _go_on(self, facts: Mapping[str, Any]) -> list[Sample]:
        run = read_run(self.path)
        for name, value in facts.items():
            known = json.loads(json.dumps(value))
            if name not in ("versions", "device") and run.facts.get(name) != known:
                raise RunError(
                    f"The run in {str(self.path)!r} has {name} {run.facts.get(name)!r}, not "
                    f"{known!r}: it cannot be gone on with. Replace it with --overwrite."
                )
        samples = list(run.samples)
        # The last batch may have been cut off in the middle: what follows writes it anew.
        lines = [json.dumps(sample.to_dict(), ensure_ascii=False) for sample in samples]
        text = "".join(f"{line}\n" for line in lines)
        write_whole(self.path / _SAMPLES, text)
        return samples

    def add(self, samples: Sequence[Sample]) -> None:
        """A batch, in one write."""
        lines = [json.dumps(sample.to_dict(), ensure_ascii=False) for sample in samples]
        with (self.path / _SAMPLES).open("a", encoding="utf8") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, seconds: float, more: Mapping[str, Any]) -> None:
        """Seconds are added to those of the parts before."""
        run = json.loads((self.path / _RUN).read_text(encoding="utf8"))
        total = round(run.get("seconds", 0.0) + seconds, 2)
        self._write({**run, "finished": True, "seconds": total, **more})

    def _write(self, facts: Mapping[str, Any]) -> None:
        write_whole(self.path / _RUN, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def read_run(folder: Path) -> Run:
    try:
        facts = json.loads((folder / _RUN).read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{str(folder)!r} holds no run: {error}.") from None
    if facts.get("format") != FORMAT:
        raise RunError(
            f"The run in {str(folder)!r} has format {facts.get('format')}, not {FORMAT}."
        )
    return Run(facts, _samples(folder / _SAMPLES, facts))


def _samples(path: Path, facts: Mapping[str, Any]) -> list[Sample]:
    samples = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunError(f"Cannot read {str(path)!r}: {error}.") from None
    for line in lines[:-1]:  # what has no end of line was cut off
        try:
            samples.append(Sample.from_dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RunError(f"A line of {str(path)!r} is no sample: {error}.") from None
    sizes = facts["batches"]
    counts: dict[int, int] = {}
    for sample in samples:
        counts[sample.batch] = counts.get(sample.batch, 0) + 1
    return [sample for sample in samples if counts[sample.batch] == sizes[sample.batch]]


def finished_run(folder: Path, wanted: Mapping[str, Any]) -> Run | None:
    """The run in `folder`, if it is whole and has the facts that are wanted."""
    if not (folder / _RUN).exists():
        return None
    run = read_run(folder)
    same = all(run.facts.get(name) == json.loads(json.dumps(x)) for name, x in wanted.items())
    return run if same and run.facts["finished"] else None


def read_runs(folder: Path) -> list[Run]:
    """Every run below `folder`, by task and method; an error if one is not whole."""
    paths = sorted(folder.rglob(_RUN))
    if not paths:
        raise RunError(f"There are no runs in {str(folder)!r}.")
    runs = [read_run(path.parent) for path in paths]
    unfinished = [f"{run.task}/{run.method}" for run in runs if not run.facts["finished"]]
    if unfinished:
        raise RunError(
            f"Not finished: {', '.join(unfinished)}. Go on with knn-moe eval … --resume."
        )
    return runs
