"""Tasks by name, by file, or from other packages (entry-point group `knn_moe.tasks`)."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from knn_moe.errors import TaskError
from knn_moe.reference.files import find_format
from knn_moe.support.registry import Registry
from knn_moe.tasks.catalogue import TASKS
from knn_moe.tasks.data import TaskData, check_data, load_task, read_rows
from knn_moe.tasks.kinds import kind_of
from knn_moe.tasks.task import Task

GROUP: Final = "knn_moe.tasks"


def all_tasks() -> Registry[Task]:
    """Return the tasks of this package and of others; the others replace ours of the same name.

    Raises:
        TaskError: An entry point gives something that is not a Task.
    """
    tasks = dict(TASKS)
    for entry in entry_points(group=GROUP):
        task = entry.load()
        if not isinstance(task, Task):
            raise TaskError(
                f"The entry point {entry.name!r} of {GROUP} must give a knn_moe.tasks.Task; it "
                f"gives {task!r}."
            )
        tasks[entry.name] = task
    return Registry("task", tasks, TaskError)


def find_task(name: str) -> Task:
    """Return the task called `name`.

    Raises:
        TaskError: There is none; the message names the closest match.
    """
    return all_tasks().find(
        name,
        hint=" Or name a file: my_task.py, which defines TASK, or questions.jsonl (.csv, …).",
    )


def open_task(name: str, source: str | Path | None = None, *, reference: bool = True) -> TaskData:
    """Load the rows of a task.

    Args:
        name: The name of a task, a .py file that defines TASK, or a file of rows or of text.
        source: As for `load_task`. Rows beside a .py file come first.
        reference: Whether the reference set is needed too.

    Raises:
        TaskError: The task is unknown, its file is missing or wrong, or its rows cannot be used.
    """
    path = Path(name)
    if path.suffix == ".py":
        task = _import_task(path)
        beside = any(path.parent.glob(f"{task.files}_{task.splits[0]}.jsonl*"))
        default = path.parent if beside or task.hub is None else None
        return load_task(task, source or default, reference=reference)
    if find_format(path) is not None:
        return _open_rows(path, reference)
    return load_task(find_task(name), source, reference=reference)


def _import_task(path: Path) -> Task:
    if not path.is_file():
        raise TaskError(f"No file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(f"knn_moe_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{str(path)!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for their own module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        raise TaskError(f"{str(path)!r} fails: {type(error).__name__}: {error}") from error
    task = getattr(module, "TASK", None)
    if not isinstance(task, Task):
        raise TaskError(f"{str(path)!r} must define TASK, a knn_moe.tasks.Task; it has {task!r}.")
    return task


def _open_rows(path: Path, reference: bool) -> TaskData:
    """Open a file of rows of one kind. NAME_ref beside it, of any format, is the reference set."""
    if not path.is_file():
        raise TaskError(f"No file {str(path)!r}.")
    rows = read_rows(path)
    kind = kind_of(rows[0])
    if kind is None:
        raise TaskError(
            f"Cannot tell what {path.name!r} asks: a row needs question, choices and answer; "
            f"question and answer; prompt and tests; or text. The first row has: "
            f"{', '.join(rows[0])}."
        )
    stem = _stem(path).removesuffix("_test")
    beside = _find_beside(path, f"{stem}_ref")
    secret = stem in TASKS and TASKS[stem].secret
    task = Task(name=stem, title=path.name, kind=kind, files=stem, secret=secret)
    reference_rows = read_rows(beside) if reference and beside is not None else []
    data = TaskData(task, rows, reference_rows, path.name)
    check_data(data, path.name, beside.name if beside is not None else "")
    return data


def _stem(path: Path) -> str:
    """Return the name of a file without its endings."""
    name = Path(path.stem) if path.suffix.lower() == ".gz" else path
    return name.stem


def _find_beside(path: Path, stem: str) -> Path | None:
    """Return the file called `stem` beside `path`.

    Raises:
        TaskError: There are several, of different formats.
    """
    found = [
        each
        for each in sorted(path.parent.iterdir())
        if find_format(each) is not None and _stem(each) == stem
    ]
    if len(found) > 1:
        raise TaskError(
            f"The reference set of {path.name!r} could be "
            f"{' or '.join(each.name for each in found)}. Keep one of them beside it."
        )
    return found[0] if found else None
