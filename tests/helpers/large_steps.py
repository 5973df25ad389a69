"""Memories of large steps, whose effect on a small model can be seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from knn_moe import BuildConfig, RoutingConfig, RoutingMemory, build_memory

LARGE_STEPS = BuildConfig(steps=5, learning_rate=2.0, gradient="dense")
LARGE_ROUTING = RoutingConfig(k=16, gamma_scale=1.5, confidence_scale=0.2)


def build_with_large_steps(model: Any, tokenizer: Any, examples: Any) -> RoutingMemory:
    """Build a memory that is recalled with many neighbours and much confidence."""
    memory = build_memory(model, tokenizer, examples, LARGE_STEPS)
    return replace(memory, manifest=replace(memory.manifest, routing=LARGE_ROUTING))
