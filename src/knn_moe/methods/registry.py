"""Every method by name, and how it is prepared on a task's reference set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from knn_moe.methods.controls import apply_control
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.support.registry import Registry

NOTHING, MEMORY, REFERENCE = "nothing", "memory", "reference"  # what a method learns from


@dataclass(frozen=True)
class MethodSpec:
    """A method that can be asked for by name.

    `prepare` names a function from TaskContext to Method as "module:function". It is imported only
    when it is needed, because some methods need optional packages.
    """

    title: str
    prepare: str
    needs: str = REFERENCE
    texts: bool = True  # whether it works on plain text, which has no question
    package: str | None = None  # the optional package it cannot do without

    def load(self, context: TaskContext) -> Method:
        """Import the prepare function and call it."""
        module, _, function = self.prepare.partition(":")
        method = getattr(import_module(f"knn_moe.methods.{module}"), function)(context)
        if not isinstance(method, Method):
            raise TypeError(f"{self.prepare} returned {method!r}, which is not a Method.")
        return method

    @property
    def installed(self) -> bool:
        """Whether the optional package it needs is installed."""
        return self.package is None or find_spec(self.package) is not None


_EMBEDDING: Final = "sentence_transformers"
METHODS: Final = Registry(
    "method",
    {
        "zero-shot": MethodSpec("Zero-shot", "method:prepare_zero_shot", NOTHING),
        "5-shot": MethodSpec(
            "5-shot", "few_shot:prepare_few_shot", texts=False, package=_EMBEDDING
        ),
        "sft": MethodSpec("SFT", "sft:prepare_sft", package="peft"),
        "sft-router": MethodSpec("SFT (Router Only)", "sft:prepare_router_sft"),
        "knn": MethodSpec("kNN-MoE", "knn_moe:prepare_knn", MEMORY),
        "knn-paper": MethodSpec("kNN-MoE (the paper's setting)", "knn_moe:prepare_paper", MEMORY),
        "knn-calibrated": MethodSpec("kNN-MoE (calibrated)", "calibrated:prepare_calibrated"),
        "knn-ivfpq": MethodSpec(
            "kNN-MoE (IVFPQ)", "knn_moe:prepare_ivfpq", MEMORY, package="faiss"
        ),
        "knn-selective": MethodSpec("kNN-MoE (Selective)", "selective:prepare_selective", MEMORY),
        "c3po": MethodSpec("C3PO (NGD)", "c3po:prepare_ngd", texts=False, package=_EMBEDDING),
        "c3po-kernel": MethodSpec(
            "C3PO (kernel regression)",
            "c3po:prepare_kernel_regression",
            texts=False,
            package=_EMBEDDING,
        ),
        "c3po-mode": MethodSpec(
            "C3PO (mode finding)", "c3po:prepare_mode_finding", texts=False, package=_EMBEDDING
        ),
        "knn-lm": MethodSpec("kNN-LM", "knn_lm:prepare_knn_lm"),
        "knn+knn-lm": MethodSpec("kNN-MoE + kNN-LM", "knn_lm:prepare_both"),
        "knn-calibrated+knn-lm": MethodSpec(
            "kNN-MoE (calibrated) + kNN-LM", "calibrated:prepare_calibrated_both"
        ),
        "knn-calibrated+head": MethodSpec(
            "kNN-MoE (calibrated) with its head", "calibrated:prepare_head"
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
    """
    spec = METHODS.find(name)
    context.shared_seconds = 0.0
    started = time.perf_counter()
    method = spec.load(context)
    if control is not None:
        method = apply_control(method, control, context)
    seconds = time.perf_counter() - started + context.shared_seconds
    return PreparedMethod(method, seconds, prepared_on(name, context))


def prepared_on(name: str, context: TaskContext) -> Mapping[str, Any]:
    """Return what of `context` matters to a method, known before the method is prepared."""
    return {} if METHODS.find(name).needs == NOTHING else context.facts()
