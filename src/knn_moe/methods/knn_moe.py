"""The paper's method (§4), as one of those that are compared."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from knn_moe.build.build import BuildProgress, build_memory, reference_tokens
from knn_moe.config import RoutingConfig
from knn_moe.index import IndexConfig
from knn_moe.inference.attach import attach, check_belongs
from knn_moe.memory.files import CONFIG_FILE
from knn_moe.memory.memory import RoutingMemory
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import Setting
from knn_moe.support.files import write_whole


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
    """The paper's own setting, one small step and one neighbour: a memory of its own."""
    return KnnMoe(routing_memory(setting, "paper"), name="knn-paper")


def prepare_ivfpq(setting: Setting) -> KnnMoe:
    """The paper's compressed variant: 8-bit codes, 32 probed lists, an eighth of the dimension."""
    memory = routing_memory(setting)
    config = replace(memory.routing, index=IndexConfig(kind="ivfpq"))
    return KnnMoe(memory, config, "knn-ivfpq")


def routing_memory(setting: Setting, preset: str | None = None) -> RoutingMemory:
    """The memory given, or one of the reference set, for all methods that want one; by a preset
    that is named, always one of the reference set."""
    if setting.memory is not None and preset is None:
        return setting.memory
    preset = preset or setting.preset
    return setting.made(f"memory-{preset}", lambda: _kept(setting, preset))


def _kept(setting: Setting, preset: str) -> RoutingMemory:
    """Kept in the setting's folder, and found there again; of a secret task nothing is kept."""
    if setting.folder is None or setting.data.task.secret:
        return _build(setting, preset, None)[0]
    count = f"{len(setting.examples)}-of-seed-{setting.seed}"
    folder = setting.folder / f"memory-{setting.scoring}-{preset}-{count}"
    clock = folder.with_name(f"seconds-of-{folder.name}")
    if clock.is_file() and (folder / CONFIG_FILE).is_file():
        memory = RoutingMemory.from_pretrained(folder)
        if _is_of(memory, setting, preset):
            setting.borrowed += float(clock.read_text(encoding="utf8"))
            return memory
    memory, seconds = _build(setting, preset, folder)
    write_whole(clock, f"{seconds:.2f}")
    return memory


def _is_of(memory: RoutingMemory, setting: Setting, preset: str) -> bool:
    """Whether it is what would be built now."""
    config = setting.build_config(preset=preset)
    check_belongs(setting.model, memory)
    tokens = reference_tokens(setting.model, setting.tokenizer, setting.examples, config)
    same = torch.equal(memory.provenance.stream, tokens.provenance.stream)
    return same and memory.build == config


def _build(setting: Setting, preset: str, folder: Path | None) -> tuple[RoutingMemory, float]:
    """And its seconds: of a build that was killed and goes on, as if it had not been."""
    share = 1.0

    def show(progress: BuildProgress) -> None:
        nonlocal share
        share = 1 - progress.resumed_tokens / max(progress.total_tokens, 1)
        setting.on_progress(progress.tokens, progress.total_tokens, progress.stage)

    started = time.perf_counter()
    memory = build_memory(
        setting.model,
        setting.tokenizer,
        setting.examples,
        setting.build_config(preset=preset),
        folder=folder,
        on_progress=show,
    )
    elapsed = time.perf_counter() - started
    return memory, elapsed / share if share > 0 else elapsed
