"""Every method by name, and how it is prepared on a task's reference set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from torch import nn

from knn_moe.errors import ConfigError, MissingDependencyError, ReferenceSetError
from knn_moe.methods.controls import apply_control
from knn_moe.methods.method import Method
from knn_moe.methods.own_embeddings import check_embedder, uses_own_embeddings
from knn_moe.methods.task_context import TaskContext
from knn_moe.reference.splits import LEAST_EXAMPLES
from knn_moe.support.registry import Registry
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.task import TEXT

NOTHING, MEMORY, REFERENCE = "nothing", "memory", "reference"  # what a method learns from


@dataclass(frozen=True)
class MethodSpec:
    """A method that can be asked for by name.

    `prepare` names a function from TaskContext to Method as "module:function", and `check` one
    that raises UnsupportedModelError if a model does not suit the method. They are imported only
    when they are needed, because some methods need optional packages.
    """

    title: str
    prepare: str
    needs: str = REFERENCE
    texts: bool = True  # whether it works on plain text, which has no question
    package: str | None = None  # the optional package it cannot do without
    rows: int = 1  # of the reference set, at least
    check: str | None = None

    def load(self, context: TaskContext) -> Method:
        """Import the prepare function and call it."""
        method = _import(self.prepare)(context)
        if not isinstance(method, Method):
            raise TypeError(f"{self.prepare} returned {method!r}, which is not a Method.")
        return method

    @property
    def installed(self) -> bool:
        """Whether the optional package it needs is installed."""
        if self.package == _EMBEDDING and uses_own_embeddings():
            return True
        return self.package is None or find_spec(self.package) is not None


def _import(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(f"knn_moe.methods.{module}"), function)


_EMBEDDING: Final = "sentence_transformers"
_INSTALL: Final = {_EMBEDDING: "'knn-moe[eval]'", "peft": "'knn-moe[tune]'", "faiss": "faiss-cpu"}
_CALIBRATED: Final = LEAST_EXAMPLES  # rows
_HELD_OUT: Final = 2  # rows, one of them to choose by
_C3PO: Final = "c3po:check_model"
METHODS: Final = Registry(
    "method",
    {
        "zero-shot": MethodSpec("Zero-shot", "method:prepare_zero_shot", NOTHING),
        "5-shot": MethodSpec(
            "5-shot", "few_shot:prepare_few_shot", texts=False, package=_EMBEDDING
        ),
        "sft": MethodSpec(
            "SFT", "sft:prepare_sft", package="peft", rows=_HELD_OUT, check="lora:find_linear_maps"
        ),
        "sft-router": MethodSpec("SFT (Router Only)", "sft:prepare_router_sft", rows=_HELD_OUT),
        "sft-router-choices": MethodSpec(
            "SFT (Router Only, on choices)",
            "sft:prepare_router_sft_on_choices",
            texts=False,
            rows=_HELD_OUT,
        ),
        "knn": MethodSpec("kNN-MoE", "knn_moe:prepare_knn", MEMORY),
        "knn-paper": MethodSpec("kNN-MoE (the paper's setting)", "knn_moe:prepare_paper", MEMORY),
        "knn-calibrated": MethodSpec(
            "kNN-MoE (calibrated)", "calibrated:prepare_calibrated", rows=_CALIBRATED
        ),
        "knn-right-answers": MethodSpec(
            "kNN-MoE (calibrated on right answers)",
            "calibrated:prepare_right_answers",
            texts=False,
            rows=_CALIBRATED,
        ),
        "knn-ivfpq": MethodSpec(
            "kNN-MoE (IVFPQ)", "knn_moe:prepare_ivfpq", MEMORY, package="faiss"
        ),
        "knn-selective": MethodSpec("kNN-MoE (Selective)", "selective:prepare_selective", MEMORY),
        "c3po": MethodSpec(
            "C3PO (NGD)", "c3po:prepare_ngd", texts=False, package=_EMBEDDING, check=_C3PO
        ),
        "c3po-kernel": MethodSpec(
            "C3PO (kernel regression)",
            "c3po:prepare_kernel_regression",
            texts=False,
            package=_EMBEDDING,
            check=_C3PO,
        ),
        "c3po-mode": MethodSpec(
            "C3PO (mode finding)",
            "c3po:prepare_mode_finding",
            texts=False,
            package=_EMBEDDING,
            check=_C3PO,
        ),
        "knn-lm": MethodSpec("kNN-LM", "knn_lm:prepare_knn_lm", rows=_HELD_OUT),
        "knn+knn-lm": MethodSpec("kNN-MoE + kNN-LM", "knn_lm:prepare_both", rows=_HELD_OUT),
        "knn-calibrated+knn-lm": MethodSpec(
            "kNN-MoE (calibrated) + kNN-LM", "calibrated:prepare_calibrated_both", rows=_CALIBRATED
        ),
        "knn-calibrated+head": MethodSpec(
            "kNN-MoE (calibrated) with its head", "calibrated:prepare_head", rows=_CALIBRATED
        ),
    },
)


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
            f"{name} needs the package {spec.package}: pip install {_INSTALL[str(spec.package)]}."
        )
    if spec.package == _EMBEDDING:
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
        _import(check)(model)


def prepared_on(name: str, context: TaskContext) -> Mapping[str, Any]:
    """Return what of `context` matters to a method, known before the method is prepared."""
    return {} if METHODS.find(name).needs == NOTHING else context.facts()
