"""The paper's method (§4), as one of those that are compared."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from knn_moe.build import BuildProgress, build_memory
from knn_moe.config import RoutingConfig
from knn_moe.handle import attach
from knn_moe.index import IndexConfig
from knn_moe.memory import RoutingMemory
from knn_moe.methods.method import Method
from knn_moe.methods.setting import Setting


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


def prepare_paper(setting: Setting) -> KnnMoe:
    """The paper's own setting: one small step, one neighbour."""
    return KnnMoe(routing_memory(setting, "paper"), name="knn-paper")


def prepare_ivfpq(setting: Setting) -> KnnMoe:
    """The paper's compressed variant: 8-bit codes, 32 probed lists, an eighth of the dimension."""
    memory = routing_memory(setting)
    config = replace(memory.routing, index=IndexConfig(kind="ivfpq"))
    return KnnMoe(memory, config, "knn-ivfpq")


def routing_memory(setting: Setting, preset: str | None = None) -> RoutingMemory:
    """The memory given, or one of the reference set, for all methods that want one."""
    if setting.memory is not None:
        return setting.memory
    preset = preset or setting.preset
    return setting.made(f"memory-{preset}", lambda: _build(setting, preset))


def _build(setting: Setting, preset: str) -> RoutingMemory:
    """Kept in the setting's folder, but for a secret task's: of that nothing is kept."""
    if setting.folder is None or setting.data.task.secret:
        return _built(setting, preset, None)
    count = f"{len(setting.examples)}-of-seed-{setting.seed}"
    folder = setting.folder / f"memory-{setting.scoring}-{preset}-{count}"
    clock = folder.with_name(f"seconds-of-{folder.name}")  # for whoever opens it again
    if setting.reuse and (folder / "memory_config.json").is_file() and clock.is_file():
        setting.borrowed += float(clock.read_text(encoding="utf8"))
        return RoutingMemory.from_pretrained(folder)
    if setting.reuse and folder.exists():
        shutil.rmtree(folder)  # made, but nobody knows how long it took
    started = time.perf_counter()
    memory = _built(setting, preset, folder)
    clock.write_text(f"{time.perf_counter() - started:.2f}", encoding="utf8")
    return memory


def _built(setting: Setting, preset: str, folder: Path | None) -> RoutingMemory:
    def show(progress: BuildProgress) -> None:
        setting.on_progress(progress.tokens, progress.total_tokens, progress.stage)

    return build_memory(
        setting.model,
        setting.tokenizer,
        setting.examples,
        setting.build_config(preset=preset),
        folder=folder,
        on_progress=show,
    )
