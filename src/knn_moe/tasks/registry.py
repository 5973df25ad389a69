"""Tasks by name, by file, or from other packages (entry-point group `knn_moe.tasks`)."""

from __future__ import annotations

import importlib.util
import sys
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from knn_moe.errors import TaskError
from knn_moe.tasks.catalogue import TASKS
from knn_moe.tasks.data import TaskData, load_task, read_rows, refuse_overlap
from knn_moe.tasks.kinds import kind_of
from knn_moe.tasks.task import Task

GROUP: Final = "knn_moe.tasks"


def all_tasks() -> dict[str, Task]:
    """Ours, and those other packages bring; theirs win."""
    found = dict(TASKS)
    for entry in entry_points(group=GROUP):
        made = entry.load()
        if not isinstance(made, Task):
            raise TaskError(
                f"The entry point {entry.name!r} of {GROUP} gives {made!r}, which is no Task."
            )
        found[entry.name] = made
    return found


def find_task(name: str) -> Task:
    tasks = all_tasks()
    if name in tasks:
        return tasks[name]
    meant = get_close_matches(name, tasks, n=1)
    hint = f" Did you mean {meant[0]!r}?" if meant else ""
    raise TaskError(
        f"Unknown task {name!r}.{hint} Available: {', '.join(tasks)}; or a file: my_task.py with a "
        f"TASK, or questions.jsonl."
    )


def open_task(name: str, source: str | Path | None = None, *, reference: bool = True) -> TaskData:
    """The rows of a task: by name, of a .py file that defines TASK, or of a .jsonl file."""
    path = Path(name)
    if path.suffix == ".py":
        task = _from_module(path)
        beside = any(path.parent.glob(f"{task.files}_{task.splits[0]}.jsonl*"))
        usual = path.parent if beside or task.hub is None else None
        return load_task(task, source or usual, reference=reference)
    if ".jsonl" in path.suffixes:
        return _from_rows(path, reference)
    return load_task(find_task(name), source, reference=reference)


def _from_module(path: Path) -> Task:
    if not path.is_file():
        raise TaskError(f"No file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(f"knn_moe_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{str(path)!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for their own module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # somebody's file: whatever it raises
        raise TaskError(f"{str(path)!r} fails: {type(error).__name__}: {error}") from error
    task = getattr(module, "TASK", None)
    if not isinstance(task, Task):
        raise TaskError(f"{str(path)!r} must define TASK, a knn_moe.tasks.Task; it has {task!r}.")
    return task


def _from_rows(path: Path, reference: bool) -> TaskData:
    """Rows of one kind. Its reference, if it has one, lies beside it as NAME_ref.jsonl."""
    if not path.is_file():
        raise TaskError(f"No file {str(path)!r}.")
    rows = read_rows(path)
    kind = kind_of(rows[0])
    if kind is None:
        raise TaskError(
            f"Cannot tell what is asked in {path.name!r}: a row needs question, choices and "
            f"answer; question and answer; prompt and tests; or text. It has: {', '.join(rows[0])}."
        )
    stem, _, ending = path.name.partition(".jsonl")
    stem = stem.removesuffix("_test")
    beside = path.with_name(f"{stem}_ref.jsonl{ending}")
    known = TASKS.get(stem)
    secret = known is not None and known.secret
    task = Task(name=stem, title=path.name, kind=kind, files=stem, secret=secret)
    remembered = read_rows(beside) if reference and beside.is_file() else []
    data = TaskData(task, rows, remembered, path.name)
    for file, part in ((path, rows), (beside, remembered)):
        for number, row in enumerate(part, start=1):
            wrong = kind.check(row)
            if wrong is not None:
                raise TaskError(f"Row {number} of {file.name} {wrong}.")
    refuse_overlap(data)
    return data
