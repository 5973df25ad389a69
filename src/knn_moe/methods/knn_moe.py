"""The paper's method (§4), as one of those that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from knn_moe.build import BuildProgress, build_memory
from knn_moe.config import BuildConfig, RoutingConfig
from knn_moe.handle import attach
from knn_moe.index import IndexConfig
from knn_moe.memory import RoutingMemory
from knn_moe.methods.method import Method
from knn_moe.methods.setting import Setting
from knn_moe.tasks.task import TEXT


@dataclass(frozen=True)
class KnnMoe(Method):
    """The model with a routing memory."""

    memory: RoutingMemory = field(repr=False)
    config: RoutingConfig | None = None  # None: the memory's own
    name: str = "knn"

    def facts(self) -> Mapping[str, Any]:
        config = self.config or self.memory.routing
        return {
            "cases": len(self.memory),
            # A kernel's width comes from all keys of its layer: it tells memories apart.
            "gamma": {str(place): layer.gamma for place, layer in self.memory.layers.items()},
            "build": self.memory.build.to_dict(),
            "routing": config.to_dict(),
        }

    def on(self, model: nn.Module) -> AbstractContextManager[Any]:
        return attach(model, self.memory, self.config)


def prepare_knn(setting: Setting) -> KnnMoe:
    memory = routing_memory(setting)
    index = setting.index
    return KnnMoe(memory, replace(memory.routing, index=index) if index else None)


def prepare_ivfpq(setting: Setting) -> KnnMoe:
    """The paper's compressed variant: 8-bit codes, 32 probed lists, an eighth of the dimension."""
    memory = routing_memory(setting)
    config = replace(memory.routing, index=IndexConfig(kind="ivfpq"))
    return KnnMoe(memory, config, "knn-ivfpq")


def routing_memory(setting: Setting) -> RoutingMemory:
    """The memory given, or one of the reference set, for all methods that want one."""
    return setting.memory or setting.made("memory", lambda: _build(setting))


def _build(setting: Setting) -> RoutingMemory:
    """Kept in the setting's folder, but for a secret task's: of that nothing is kept."""
    count = f"{len(setting.examples)}-of-seed-{setting.seed}"
    folder = None
    if setting.folder is not None and not setting.data.task.secret:
        folder = setting.folder / f"memory-{setting.scoring}-{setting.preset}-{count}"
        if setting.reuse and (folder / "memory_config.json").is_file():
            return RoutingMemory.from_pretrained(folder)

    def show(progress: BuildProgress) -> None:
        setting.on_progress(progress.tokens, progress.total_tokens, progress.stage)

    config = BuildConfig(preset=setting.preset)
    if setting.scoring == TEXT:
        config = replace(config, max_length=setting.length)
    return build_memory(
        setting.model, setting.tokenizer, setting.examples, config, folder=folder, on_progress=show
    )
