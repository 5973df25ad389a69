"""How a method is prepared on a task's reference set, and which methods cannot be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from knn_moe.errors import ConfigError, MissingDependencyError, ReferenceSetError
from knn_moe.methods.catalogue import (
    EMBEDDING,
    INSTALL,
    METHODS,
    NOTHING,
    REFERENCE,
    import_function,
)
from knn_moe.methods.controls import apply_control
from knn_moe.methods.method import Method
from knn_moe.methods.own_embeddings import check_embedder
from knn_moe.methods.task_context import TaskContext
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.task import TEXT


@dataclass(frozen=True)
class PreparedMethod:
    """A method, the seconds its preparation took, and what it was prepared on (for JSON)."""

    method: Method
    seconds: float
    prepared_on: Mapping[str, Any]


def prepare(name: str, context: TaskContext, control: str | None = None) -> PreparedMethod:
    """Prepare a method on a task's reference set.

    Args:
        name: A name of METHODS.
        context: The model and the task. Methods prepared on one context share what they can; the
            time of a shared part counts in full for each of them.
        control: Remove one thing from the memory of a kNN-MoE method (adapt/controls.py).

    Raises:
        ConfigError: There is no such method or control, or the method has no memory to control.
        KnnMoeError: The method cannot answer this task: see `check_method`.
    """
    spec = METHODS.find(name)
    check_method(name, context.data, context.scoring, context.limit)
    context.shared_seconds = 0.0
    started = time.perf_counter()
    method = spec.load(context)
    if control is not None:
        method = apply_control(method, control, context)
    seconds = time.perf_counter() - started + context.shared_seconds
    return PreparedMethod(method, seconds, prepared_on(name, context))


def check_method(name: str, data: TaskData, scoring: str, limit: int | None = None) -> None:
    """Refuse a method that cannot answer a task. This needs no model.

    Args:
        name: A name of METHODS.
        data: The task.
        scoring: "generation", "likelihood" or "text".
        limit: At most so many rows of the reference set are used. None: all.

    Raises:
        ConfigError: There is no such method, it needs questions, or there is no embedding model.
        MissingDependencyError: It needs a package that is not installed.
        ReferenceSetError: It needs more reference rows.
    """
    spec, task = METHODS.find(name), data.task.name
    if scoring == TEXT and not spec.texts:
        raise ConfigError(
            f"{name} needs questions, and {task} is plain text. Leave out {name} for this task."
        )
    if not spec.installed:
        raise MissingDependencyError(
            f"{name} needs the package {spec.package}: pip install {INSTALL[str(spec.package)]}."
        )
    if spec.package == EMBEDDING:
        check_embedder()
    rows = len(data.reference) if limit is None else min(limit, len(data.reference))
    if spec.needs == REFERENCE and rows < spec.rows:
        raise ReferenceSetError(
            f"{name} needs at least {spec.rows} reference rows, and it would have {rows} of "
            f"{task}. Use more of them, or leave out {name}."
        )


def check_model(name: str, model: nn.Module) -> None:
    """Refuse a method that does not suit a model.

    Raises:
        UnsupportedModelError: It does not.
    """
    check = METHODS.find(name).check
    if check is not None:
        import_function(check)(model)


def prepared_on(name: str, context: TaskContext) -> Mapping[str, Any]:
    """Return what of `context` matters to a method, known before the method is prepared."""
    return {} if METHODS.find(name).needs == NOTHING else context.facts()
