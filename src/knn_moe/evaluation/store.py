"""Runs on disk: a folder for each task and method, written batch by batch.

RUNS/TASK/METHOD/run.json describes the run and says whether it is finished; samples.jsonl has a
line for each question, and asked.jsonl.gz the questions themselves, unless they are secret. A run
that was interrupted can be resumed with the next batch.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from knn_moe.errors import RunError
from knn_moe.memory.manifest import rename_routing
from knn_moe.support.files import read_lines, write_whole
from knn_moe.tasks.sample import Asked, Sample

FORMAT: Final = 1
_RUN: Final = "run.json"
_SAMPLES: Final = "samples.jsonl"
_ASKED: Final = "asked.jsonl.gz"
# In a run that is resumed; earlier versions did not say "secret".
_MAY_DIFFER: Final = ("versions", "device", "title", "note", "secret")


@dataclass(frozen=True)
class Run:
    """What was evaluated, and the sample of every question."""

    facts: Mapping[str, Any]
    samples: list[Sample]
    folder: Path | None = field(default=None, compare=False)  # where it was read from

    @property
    def task(self) -> str:
        return str(self.facts["task"])

    @property
    def method(self) -> str:
        return str(self.facts["method"])


class RunFolder:
    """The folder of a run that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, facts: Mapping[str, Any], *, resume: bool, overwrite: bool) -> list[Sample]:
        """Start a run, or continue one.

        Args:
            facts: What identifies the run, as JSON takes it.
            resume: Continue a run that exists.
            overwrite: Replace a run that exists.

        Returns:
            The samples of the batches that are finished already.

        Raises:
            RunError: There is a run already, or it differs from this one in a fact.
        """
        if overwrite or not (self.path / _RUN).exists():
            # A run is described last, so that samples of another run never belong to it.
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / _RUN).unlink(missing_ok=True)
            (self.path / _ASKED).unlink(missing_ok=True)
            write_whole(self.path / _SAMPLES, "")
            self._write({"format": FORMAT, "finished": False, **facts})
            return []
        if not resume:
            self.refuse_existing()
        return self._resume(facts)

    def refuse_existing(self) -> None:
        """Raise RunError if there is a run already: call it before an expensive preparation."""
        if (self.path / _RUN).exists():
            raise RunError(
                f"There is a run in {str(self.path)!r} already. Continue it with --resume, or "
                f"replace it with --overwrite."
            )

    def _resume(self, facts: Mapping[str, Any]) -> list[Sample]:
        run = read_run(self.path)
        for name, value in facts.items():
            wanted = _as_json(value)
            if name not in _MAY_DIFFER and run.facts.get(name) != wanted:
                raise RunError(
                    f"This run cannot be resumed: {name} was {run.facts.get(name)!r} in "
                    f"{str(self.path)!r} and is {wanted!r} now. Replace it with --overwrite."
                )
        # The last batch may be incomplete: it is dropped here and answered again.
        write_whole(self.path / _SAMPLES, _as_lines(run.samples))
        return run.samples

    def write_asked(self, asked: Iterable[Asked]) -> None:
        """Write what each question asks, for people who read the run."""
        lines = (json.dumps(each.to_dict(), ensure_ascii=False) + "\n" for each in asked)
        write_whole(self.path / _ASKED, "".join(lines))

    def append(self, samples: Sequence[Sample]) -> None:
        """Write the samples of a batch, durably."""
        with (self.path / _SAMPLES).open("a", encoding="utf8") as file:
            file.write(_as_lines(samples))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, seconds: float, more: Mapping[str, Any]) -> None:
        """Mark the run as finished.

        Args:
            seconds: The duration of this session; those of earlier sessions are added.
            more: Further facts, measured during the run.
        """
        facts = json.loads((self.path / _RUN).read_text(encoding="utf8"))
        total = round(facts.get("seconds", 0.0) + seconds, 2)
        self._write({**facts, "finished": True, "seconds": total, **more})

    def _write(self, facts: Mapping[str, Any]) -> None:
        write_whole(self.path / _RUN, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def read_run(folder: Path) -> Run:
    """Read a run; of one that is not finished, the batches that are.

    Raises:
        RunError: The folder has no run, or one that cannot be read.
    """
    try:
        facts = json.loads((folder / _RUN).read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise RunError(f"There is no run in {str(folder)!r}: {error}.") from None
    if facts.get("format") != FORMAT:
        raise RunError(
            f"The run in {str(folder)!r} has format {facts.get('format')}; this version reads "
            f"format {FORMAT}."
        )
    method = facts.get("method_facts", {})
    if "routing" in method:
        method["routing"] = rename_routing(method["routing"])
    samples = _read_samples(folder / _SAMPLES, finished=bool(facts.get("finished")))
    counts = Counter(sample.batch for sample in samples)
    sizes = facts["batches"]
    whole = [sample for sample in samples if counts[sample.batch] == sizes[sample.batch]]
    return Run(facts, whole, folder)


def read_asked(run: Run) -> dict[str, Asked]:
    """Return what each question asks, by id; nothing where it is secret or was not stored.

    Raises:
        RunError: The file cannot be read.
    """
    path = run.folder / _ASKED if run.folder else None
    if run.facts.get("secret") or path is None or not path.exists():
        return {}
    asked = {}
    for number, line in read_lines(path, RunError):
        try:
            one = Asked.from_dict(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"Line {number} of {str(path)!r} is no question: {error}.") from None
        asked[one.id] = one
    return asked


def _read_samples(path: Path, *, finished: bool) -> list[Sample]:
    """Read the samples of a run; of one that is not finished, those before a line that is none: a
    power cut may leave anything there."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # the last is cut off
    except OSError as error:
        raise RunError(f"Cannot read {str(path)!r}: {error}.") from None
    samples = []
    for line in lines:
        try:
            samples.append(Sample.from_dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            if finished:
                raise RunError(f"A line of {str(path)!r} is not a sample: {error}.") from None
            break
    return samples


def find_finished_run(folder: Path, wanted: Mapping[str, Any]) -> Run | None:
    """Return the run in `folder` if it is finished and has the `wanted` facts."""
    if not (folder / _RUN).exists():
        return None
    run = read_run(folder)
    same = all(run.facts.get(name) == _as_json(value) for name, value in wanted.items())
    return run if same and run.facts["finished"] else None


def read_runs(folder: Path) -> list[Run]:
    """Read every run below `folder`, sorted by task and method.

    Raises:
        RunError: There is none, or one is not finished.
    """
    paths = sorted(folder.rglob(_RUN))
    if not paths:
        raise RunError(f"There are no runs in {str(folder)!r}.")
    runs = [read_run(path.parent) for path in paths]
    unfinished = [f"{run.task}/{run.method}" for run in runs if not run.facts["finished"]]
    if unfinished:
        raise RunError(
            f"Not finished: {', '.join(unfinished)}. Continue with knn-moe eval … --resume."
        )
    return runs


def _as_json(value: Any) -> Any:
    """Return a value as it is after writing and reading it."""
    return json.loads(json.dumps(value))


def _as_lines(samples: Iterable[Sample]) -> str:
    return "".join(json.dumps(each.to_dict(), ensure_ascii=False) + "\n" for each in samples)
