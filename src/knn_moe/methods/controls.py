"""The controls, as methods: what they leave of a gain, in the table where the gain stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from knn_moe.adapt.controls import control
from knn_moe.methods.knn_moe import KnnMoe, prepare_knn
from knn_moe.methods.task_context import Setting


@dataclass(frozen=True)
class Controlled(KnnMoe):
    """The model with a memory that one thing was taken from."""

    control: str = ""
    seed: int = 0

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "control": self.control, "seed": self.seed}


def prepare_shuffled(setting: Setting) -> Controlled:
    return _controlled(setting, "shuffled")


def prepare_random(setting: Setting) -> Controlled:
    return _controlled(setting, "random")


def prepare_own_logits(setting: Setting) -> Controlled:
    return _controlled(setting, "own-logits")


def _controlled(setting: Setting, kind: str) -> Controlled:
    """Of the very memory that `knn` is asked with, searched alike."""
    knn, seed = prepare_knn(setting), setting.seed
    memory = control(knn.memory, kind, setting.model, seed=seed)
    config = knn.config and replace(memory.routing, index=knn.config.index)
    return Controlled(memory, config, f"knn-{kind}", kind, seed)
