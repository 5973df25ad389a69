"""Every method by name: its title, what it needs, and the function that prepares it.

Imports none of the methods, so that they can be listed without waiting for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from knn_moe.config import LEAST_EXAMPLES
from knn_moe.support.registry import Registry

if TYPE_CHECKING:
    from knn_moe.methods.method import Method
    from knn_moe.methods.task_context import TaskContext

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
        from knn_moe.methods.method import Method

        method = import_function(self.prepare)(context)
        if not isinstance(method, Method):
            raise TypeError(f"{self.prepare} returned {method!r}, which is not a Method.")
        return method

    @property
    def installed(self) -> bool:
        """Whether the optional package it needs is installed."""
        if self.package == EMBEDDING and import_function("own_embeddings:uses_own_embeddings")():
            return True
        return self.package is None or find_spec(self.package) is not None


def import_function(name: str) -> Any:
    """Return what "module:function" names among the modules of this package."""
    module, _, function = name.partition(":")
    return getattr(import_module(f"knn_moe.methods.{module}"), function)


EMBEDDING: Final = "sentence_transformers"
INSTALL: Final = {EMBEDDING: "'knn-moe[eval]'", "peft": "'knn-moe[tune]'", "faiss": "faiss-cpu"}
_CALIBRATED: Final = LEAST_EXAMPLES  # rows
_HELD_OUT: Final = 2  # rows, one of them to choose by
_C3PO: Final = "c3po:check_model"
METHODS: Final = Registry(
    "method",
    {
        "zero-shot": MethodSpec("Zero-shot", "method:prepare_zero_shot", NOTHING),
        "5-shot": MethodSpec("5-shot", "few_shot:prepare_few_shot", texts=False, package=EMBEDDING),
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
        "knn-distilled": MethodSpec(
            "kNN-MoE (distilled)", "calibrated:prepare_distilled", rows=_CALIBRATED
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
            "C3PO (NGD)", "c3po:prepare_ngd", texts=False, package=EMBEDDING, check=_C3PO
        ),
        "c3po-kernel": MethodSpec(
            "C3PO (kernel regression)",
            "c3po:prepare_kernel_regression",
            texts=False,
            package=EMBEDDING,
            check=_C3PO,
        ),
        "c3po-mode": MethodSpec(
            "C3PO (mode finding)",
            "c3po:prepare_mode_finding",
            texts=False,
            package=EMBEDDING,
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
