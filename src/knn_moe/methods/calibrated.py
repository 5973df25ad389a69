"""kNN-MoE with everything chosen on the reference set (adapt/calibrate, adapt/distil), or an
error."""

from __future__ import annotations

from dataclasses import replace

from knn_moe.adapt.distil.distil import build_distilled
from knn_moe.memory.memory import RoutingMemory
from knn_moe.methods.knn_lm import CombinedMethod, prepare_knn_lm
from knn_moe.methods.knn_moe import KnnMoe, calibrated_memory, without_head
from knn_moe.methods.task_context import TaskContext


def prepare_calibrated(context: TaskContext) -> KnnMoe:
    """Build and calibrate a memory of the reference set."""
    memory = without_head(calibrated_memory(context))
    index = context.index or memory.routing.index
    return KnnMoe(memory, replace(memory.routing, index=index), "knn-calibrated")


def prepare_distilled(context: TaskContext) -> KnnMoe:
    """Build a memory of the reference set and distil it."""

    def build() -> RoutingMemory:
        memory, _ = build_distilled(
            context.model,
            context.tokenizer,
            context.examples,
            context.build_config(),
            on_progress=context.on_progress,
        )
        return memory

    return KnnMoe(context.cached("memory-distilled", build), name="knn-distilled")


def prepare_right_answers(context: TaskContext) -> KnnMoe:
    """Build and calibrate a memory that has not seen the wrong answers of its questions."""
    memory = without_head(calibrated_memory(context, by_choices=False))
    return KnnMoe(memory, name="knn-right-answers")


def prepare_head(context: TaskContext) -> KnnMoe:
    """Use the same memory also in the language-model head, where that helped on held-out text."""
    return KnnMoe(calibrated_memory(context), name="knn-calibrated+head")


def prepare_calibrated_both(context: TaskContext) -> CombinedMethod:
    """Add the kNN-LM head of the model alone: see knn_lm.prepare_both."""
    parts = prepare_calibrated(context), prepare_knn_lm(context)
    return CombinedMethod(parts, "knn-calibrated+knn-lm")
