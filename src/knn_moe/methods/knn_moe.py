"""kNN-MoE, the paper's method (§4), as one of the compared methods."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from knn_moe.build.build import build_memory, reference_tokens
from knn_moe.config import RoutingConfig
from knn_moe.index import IndexConfig
from knn_moe.inference.attach import Routing, attach, check_belongs
from knn_moe.memory.files import CONFIG_FILE
from knn_moe.memory.memory import RoutingMemory
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.support.files import write_whole
from knn_moe.support.progress import Progress


@dataclass(frozen=True)
class KnnMoe(Method):
    """The model with a routing memory."""

    memory: RoutingMemory = field(repr=False)
    config: RoutingConfig | None = None  # None: the memory's own
    name: str = "knn"

    def facts(self) -> Mapping[str, Any]:
        config, seed = self.config or self.memory.routing, self.memory.manifest.random_seed
        return {
            **({} if seed is None else {"random_seed": seed}),
            "cases": len(self.memory),
            # γ depends on all keys of a layer, so it tells memories apart.
            "gamma": {str(place): layer.gamma for place, layer in self.memory.layers.items()},
            "build": self.memory.build.to_dict(),
            "routing": config.to_dict(),
        }

    def apply_to(self, model: nn.Module) -> AbstractContextManager[Any]:
        return attach(model, self.memory, self.config)

    def observe(self, attached: Routing) -> Mapping[str, Any]:
        """Return per layer the mean λ and the share of tokens whose experts changed."""
        stats = attached.stats()
        return {
            "routing": {
                "mean_confidence": {str(layer): x.mean_confidence for layer, x in stats.items()},
                "rerouted": {str(layer): x.changed for layer, x in stats.items()},
            }
        }


def prepare_knn(context: TaskContext) -> KnnMoe:
    """Build or take the memory of a task, to be searched as the context says."""
    memory = routing_memory(context)
    index = context.index
    return KnnMoe(memory, replace(memory.routing, index=index) if index else None)


def prepare_paper(context: TaskContext) -> KnnMoe:
    """Build a memory by the preset "paper": one small step and one neighbour."""
    return KnnMoe(routing_memory(context, "paper"), name="knn-paper")


def prepare_ivfpq(context: TaskContext) -> KnnMoe:
    """Use the paper's compressed index: 8-bit codes, 32 probed lists, d/8 sub-quantisers."""
    memory = routing_memory(context)
    config = replace(memory.routing, index=IndexConfig(kind="ivfpq"))
    return KnnMoe(memory, config, "knn-ivfpq")


def routing_memory(context: TaskContext, preset: str | None = None) -> RoutingMemory:
    """Return the memory of a context, built once for all methods that need it.

    Args:
        context: The model and the task.
        preset: None: the context's own memory if it has one, else one by the context's preset. A
            name: always a memory of the reference set, built by that preset.
    """
    if context.memory is not None and preset is None:
        return context.memory
    preset = preset or context.preset
    return context.cached(f"memory-{preset}", lambda: _load_or_build(context, preset))


def _load_or_build(context: TaskContext, preset: str) -> RoutingMemory:
    """Memories are kept in the context's folder, except those of a secret task."""
    if context.folder is None or context.data.task.secret:
        return _build(context, preset, None)[0]
    count = f"{len(context.examples)}-of-seed-{context.seed}"
    folder = context.folder / f"memory-{context.scoring}-{preset}-{count}"
    clock = folder.with_name(f"seconds-of-{folder.name}")
    if clock.is_file() and (folder / CONFIG_FILE).is_file():
        memory = RoutingMemory.from_pretrained(folder)
        if _is_current(memory, context, preset):
            context.shared_seconds += float(clock.read_text(encoding="utf8"))
            return memory
    memory, seconds = _build(context, preset, folder)
    write_whole(clock, f"{seconds:.2f}")
    return memory


def _is_current(memory: RoutingMemory, context: TaskContext, preset: str) -> bool:
    """Return whether building now would give this memory."""
    config = context.build_config(preset=preset)
    check_belongs(context.model, memory)
    tokens = reference_tokens(context.model, context.tokenizer, context.examples, config)
    same = torch.equal(memory.provenance.stream, tokens.provenance.stream)
    return same and memory.build == config


def _build(context: TaskContext, preset: str, folder: Path | None) -> tuple[RoutingMemory, float]:
    """Return the memory and its seconds; a resumed build counts as if it had not been killed."""
    share = 1.0

    def show(progress: Progress) -> None:
        nonlocal share
        if progress.stage == "resuming":
            share = 1 - progress.done / max(progress.total, 1)
        context.on_progress(progress)

    started = time.perf_counter()
    memory = build_memory(
        context.model,
        context.tokenizer,
        context.examples,
        context.build_config(preset=preset),
        folder=folder,
        on_progress=show,
    )
    elapsed = time.perf_counter() - started
    return memory, elapsed / share if share > 0 else elapsed
