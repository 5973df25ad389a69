"""kNN-MoE with everything chosen on the reference set (adapt/calibrate), as a compared method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from knn_moe.adapt.calibrate.build_calibrated import build_calibrated
from knn_moe.config import CalibrationConfig
from knn_moe.memory.memory import RoutingMemory
from knn_moe.methods.knn_lm import CombinedMethod, prepare_knn_lm
from knn_moe.methods.knn_moe import KnnMoe
from knn_moe.methods.task_context import TaskContext


@dataclass(frozen=True)
class CalibratedKnnMoe(KnnMoe):
    """The model with a calibrated memory."""

    name: str = "knn-calibrated"

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "calibration": self.memory.manifest.calibration}


def prepare_calibrated(context: TaskContext) -> CalibratedKnnMoe:
    """Build and calibrate a memory of the reference set; the context's preset has no effect."""
    memory = _calibrated_memory(context)
    return CalibratedKnnMoe(memory, replace(memory.routing, head=None))


def prepare_head(context: TaskContext) -> CalibratedKnnMoe:
    """Use the same memory also in the language-model head, where that helped on held-out text."""
    return CalibratedKnnMoe(_calibrated_memory(context), name="knn-calibrated+head")


def prepare_calibrated_both(context: TaskContext) -> CombinedMethod:
    """Add the kNN-LM head of the model alone: see knn_lm.prepare_both."""
    parts = prepare_calibrated(context), prepare_knn_lm(context)
    return CombinedMethod(parts, "knn-calibrated+knn-lm")


def _calibrated_memory(context: TaskContext) -> RoutingMemory:
    """Return one memory for all methods above; choosing a head as well takes little time."""

    def build() -> RoutingMemory:
        memory, _ = build_calibrated(
            context.model,
            context.tokenizer,
            context.examples,
            context.build_config(),
            CalibrationConfig(head=True),
            on_progress=context.on_progress,
        )
        return memory

    return context.cached("memory-calibrated", build)
