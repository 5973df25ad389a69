"""Controls for kNN-MoE: the same method, with one thing removed from its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from knn_moe.adapt.controls import control
from knn_moe.errors import ConfigError
from knn_moe.methods.knn_moe import KnnMoe
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext


@dataclass(frozen=True)
class ControlledKnnMoe(KnnMoe):
    """kNN-MoE with a memory from which one thing was removed."""

    control: str = ""
    seed: int = 0

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "control": self.control, "seed": self.seed}


def apply_control(method: Method, kind: str, context: TaskContext) -> ControlledKnnMoe:
    """Return `method` with a control of its memory, which is searched in the same way.

    Raises:
        ConfigError: The method has no memory, or there is no such control.
    """
    if not isinstance(method, KnnMoe):
        raise ConfigError(f"{method.name!r} has no routing memory, so it has no control.")
    memory = control(method.memory, kind, context.model, seed=context.seed)
    config = method.config and replace(memory.routing, index=method.config.index)
    return ControlledKnnMoe(memory, config, f"{method.name}-{kind}", kind, context.seed)
