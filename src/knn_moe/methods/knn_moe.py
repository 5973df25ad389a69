"""kNN-MoE, the paper's method (§4), as one of the compared methods."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from knn_moe.adapt.calibrate.build_calibrated import build_calibrated
from knn_moe.build.build import build_memory, reference_tokens
from knn_moe.config import CalibrationConfig, RoutingConfig
from knn_moe.errors import CalibrationError
from knn_moe.index import IndexConfig
from knn_moe.inference.arguments import open_memory
from knn_moe.inference.attach import Routing, attach, check_belongs
from knn_moe.memory.files import CONFIG_FILE
from knn_moe.memory.memory import RoutingMemory
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.support.files import write_whole
from knn_moe.support.progress import Progress

PAPER: Final = "paper"  # the preset of the paper


@dataclass(frozen=True)
class KnnMoe(Method):
    """The model with a routing memory, which may be given as its folder or hub id."""

    memory: RoutingMemory = field(repr=False)
    config: RoutingConfig | None = None  # None: the memory's own
    name: str = "knn"

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", open_memory(self.memory))

    def facts(self) -> Mapping[str, Any]:
        config, manifest = self.config or self.memory.routing, self.memory.manifest
        seed, calibration = manifest.random_seed, manifest.calibration
        return {
            **({} if seed is None else {"random_seed": seed}),
            **({} if calibration is None else {"calibration": _without_times(calibration)}),
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


def _without_times(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out how long it took: a run is resumed by a memory of the same facts."""
    return {name: fact for name, fact in calibration.items() if not name.startswith("seconds")}


def prepare_knn(context: TaskContext) -> KnnMoe:
    """Take the context's memory or prepare one, to be searched as the context says."""
    memory = routing_memory(context)
    index = context.index
    return KnnMoe(memory, replace(memory.routing, index=index) if index else None)


def prepare_paper(context: TaskContext) -> KnnMoe:
    """Build a memory by the preset "paper": one small step, one neighbour. Or take a given one."""
    if context.memory is None:
        return KnnMoe(routing_memory(context, PAPER), name="knn-paper")
    context.notes.append("knn-paper uses the memory that was given, as knn does.")
    return replace(prepare_knn(context), name="knn-paper")


def prepare_ivfpq(context: TaskContext) -> KnnMoe:
    """Use the paper's compressed index: 8-bit codes, 32 probed lists, d/8 sub-quantisers."""
    memory = routing_memory(context)
    config = replace(memory.routing, index=IndexConfig(kind="ivfpq"))
    return KnnMoe(memory, config, "knn-ivfpq")


def routing_memory(context: TaskContext, preset: str | None = None) -> RoutingMemory:
    """Return the memory of a context, built once for all methods that need it.

    Args:
        context: The model and the task.
        preset: None: the context's own memory if it has one, else one by the context's preset, and
            without that a calibrated one if possible. A name: always a memory of the reference
            set, built by that preset.
    """
    if context.memory is not None and preset is None:
        return context.memory
    named = preset or context.preset
    if named is None:
        return context.cached("memory-recommended", lambda: _calibrate_if_possible(context))
    return context.cached(f"memory-{named}", lambda: _load_or_build(context, named))


def _calibrate_if_possible(context: TaskContext) -> RoutingMemory:
    """Return a calibrated memory, or one by the paper's preset and a note that says why."""
    try:
        return without_head(calibrated_memory(context))
    except CalibrationError as error:
        context.notes.append(
            f"kNN-MoE uses the preset {PAPER!r} on {context.data.task.name}: {error}"
        )
        return routing_memory(context, PAPER)


def calibrated_memory(context: TaskContext, *, by_choices: bool = True) -> RoutingMemory:
    """Return a memory with everything chosen on the reference set; no preset has an effect.

    It has a language-model head where that helped: choosing one takes little time, and one memory
    then serves the methods with a head and, by `without_head`, those without.

    Args:
        context: The model and the task.
        by_choices: Learn from the wrong answers too, where questions have some.

    Raises:
        CalibrationError: There are too few examples.
    """

    def build() -> RoutingMemory:
        examples = context.examples
        if not by_choices:
            examples = [replace(example, distractors=()) for example in examples]
        memory, _ = build_calibrated(
            context.model,
            context.tokenizer,
            examples,
            context.build_config(),
            CalibrationConfig(head=True),
            on_progress=context.on_progress,
        )
        return memory

    return context.cached("memory-calibrated" if by_choices else "memory-right-answers", build)


def without_head(memory: RoutingMemory) -> RoutingMemory:
    """Return the same memory for routing only."""
    routing = replace(memory.routing, head=None)
    return replace(memory, manifest=replace(memory.manifest, routing=routing))


def _load_or_build(context: TaskContext, preset: str) -> RoutingMemory:
    """Memories are kept in the context's folder, except those of a secret task."""
    if context.folder is None or context.data.task.secret:
        return _build(context, preset, None)[0]
    count = f"{len(context.examples)}-of-seed-{context.seed}"
    folder = context.folder / f"memory-{context.scoring}-{preset}-{count}"
    clock = folder.with_name(f"seconds-of-{folder.name}")
    current = False
    if (folder / CONFIG_FILE).is_file():
        memory = RoutingMemory.from_pretrained(folder)
        current = _is_current(memory, context, preset)
        if current and clock.is_file():
            context.shared_seconds += float(clock.read_text(encoding="utf8"))
            return memory
    # A kill may have left a memory without its time, which is built again to be timed.
    memory, seconds = _build(context, preset, folder, overwrite=current)
    write_whole(clock, f"{seconds:.2f}")
    return memory


def _is_current(memory: RoutingMemory, context: TaskContext, preset: str) -> bool:
    """Return whether building now would give this memory."""
    config = context.build_config(preset=preset)
    check_belongs(context.model, memory)
    tokens = reference_tokens(context.model, context.tokenizer, context.examples, config)
    same = torch.equal(memory.provenance.stream, tokens.provenance.stream)
    return same and memory.build == config


def _build(
    context: TaskContext, preset: str, folder: Path | None, *, overwrite: bool = False
) -> tuple[RoutingMemory, float]:
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
        overwrite=overwrite,
        on_progress=show,
    )
    elapsed = time.perf_counter() - started
    return memory, elapsed / share if share > 0 else elapsed
