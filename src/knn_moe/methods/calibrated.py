"""kNN-MoE with everything chosen by the reference set (calibration/), as one of the methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from knn_moe.adapt.calibrate.build_calibrated import build_calibrated
from knn_moe.config import CalibrationConfig
from knn_moe.memory.memory import RoutingMemory
from knn_moe.methods.knn_lm import Together, prepare_knn_lm
from knn_moe.methods.knn_moe import KnnMoe
from knn_moe.methods.task_context import TaskContext
from knn_moe.support.progress import Progress


@dataclass(frozen=True)
class Calibrated(KnnMoe):
    """The model with a memory that calibrated itself."""

    name: str = "knn-calibrated"

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "calibration": self.memory.manifest.calibration}


def prepare_calibrated(context: TaskContext) -> Calibrated:
    """Always a memory of the reference set; of a context's preset nothing is left."""
    memory = _memory(context)
    return Calibrated(memory, replace(memory.routing, head=None))


def prepare_head(context: TaskContext) -> Calibrated:
    """The same memory, which also tells the next token, where that was found to help."""
    return Calibrated(_memory(context), name="knn-calibrated+head")


def prepare_calibrated_both(context: TaskContext) -> Together:
    """And the kNN-LM head of the model alone: see knn_lm.prepare_both."""
    parts = prepare_calibrated(context), prepare_knn_lm(context)
    return Together(parts, "knn-calibrated+knn-lm")


def _memory(context: TaskContext) -> RoutingMemory:
    """One for all methods that want it. Choosing a head as well takes next to no time."""
    return context.cached("memory-calibrated", lambda: _build(context))


def _build(context: TaskContext) -> RoutingMemory:
    memory, _ = build_calibrated(
        context.model,
        context.tokenizer,
        context.examples,
        context.build_config(),
        CalibrationConfig(head=True),
        on_progress=lambda *step: context.on_progress(Progress(*step)),
    )
    return memory
