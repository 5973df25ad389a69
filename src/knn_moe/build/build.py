"""Memory construction (§4.1): read a reference set once and stream what it teaches to disk.

Puts together the reference tokens (reference/windows.py), the optimisation (optimise.py) and the
writer. While one batch is written, the next is computed. Peak memory is that of two batches and the
reference's token ids, however many keys there are. A killed build is resumed where it stopped: its
workspace (workspace.py) has a journal of the batches whose rows are on disk (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from knn_moe.build.background_writer import BackgroundWriter
from knn_moe.build.checkpoint import BuildCheckpoint, make_plan
from knn_moe.build.optimise import optimise_routing
from knn_moe.build.workspace import Workspace, partial_folder
from knn_moe.config import BuildConfig
from knn_moe.errors import BuildError, ConfigError, ReferenceSetError
from knn_moe.memory.files import refuse_existing
from knn_moe.memory.layers import LayerShape
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.choices import add_distractors
from knn_moe.reference.examples import Example
from knn_moe.reference.load import Examples, iter_examples
from knn_moe.reference.windows import Batch, ReferenceTokens, read_tokens
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.fingerprint import (
    identify,
    identify_tokenizer,
    layer_digests,
    sketch_weights,
)
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.intercept import find_hook
from knn_moe.routers.model_state import (
    explain_out_of_memory,
    forget_compiled_graphs,
    freeze,
    input_device,
    max_positions,
    uncompiled,
    unwrap,
)
from knn_moe.support.folders import TemporaryFolder
from knn_moe.support.given import describe
from knn_moe.support.progress import OnProgress, Progress, ignore_progress


def build_memory(
    model: nn.Module,
    tokenizer: Any,
    examples: Examples,
    config: BuildConfig | None = None,
    *,
    folder: str | Path | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> RoutingMemory:
    """Build a memory of `examples` for `model`, which is left as it was.

    Args:
        model: A Hugging Face MoE model.
        tokenizer: Its tokenizer.
        examples: A file, a folder, a table or a list of examples: all that `load_examples` takes.
        config: How to build. None: the paper's preset.
        folder: Where the memory is streamed to and opened from, memory-mapped. A build of the same
            model, reference set and config that was killed on its way there is resumed. None: a
            temporary folder that lives as long as the memory.
        overwrite: Replace a memory that is in `folder`, once the new one is whole.
        on_progress: Called with tokens done and in all: "resuming" for those that an earlier run
            did, "optimising", then "sealing".

    Returns:
        The memory, opened from its folder.

    Raises:
        BuildError: The model has a memory attached, another process builds to `folder`, or it
            holds part of another build.
        MemoryFormatError: There is something in `folder`, and `overwrite` is not set.
        ReferenceSetError: The examples cannot be read, or do not fit the model.
        ModelTooLargeError: A batch does not fit in memory beside the model.
        DiskFullError: The disk has less space than the memory needs.
    """
    holds = TemporaryFolder() if folder is None else None
    target = holds.path / "memory" if holds else Path(str(folder))
    to = Destination(target=target, overwrite=overwrite, durable=holds is None)
    memory = build_to(to, model, tokenizer, examples, config or BuildConfig(), on_progress)
    return replace(memory, _holds=holds)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a memory is built to."""

    target: Path
    overwrite: bool = False
    durable: bool = True  # wait for the disk
    part: bool = False  # of a larger job, which finds the memory when it is resumed


def build_to(
    to: Destination,
    model: nn.Module,
    tokenizer: Any,
    examples: Examples,
    config: BuildConfig,
    on_progress: OnProgress,
) -> RoutingMemory:
    """Build a memory as `build_memory` does, or open it if it was built there by a job like this
    that was killed."""
    model = uncompiled(model)
    if not isinstance(config, BuildConfig):
        raise ConfigError(f"A memory is built as a BuildConfig says, got {describe(config)}.")
    if not partial_folder(to.target).exists():
        refuse_existing(to.target, overwrite=to.overwrite)  # before the examples are read
    routers = find_routers(model)
    if any(find_hook(router) for router in routers):
        raise BuildError("The model has a memory attached. Detach it before building another.")
    reference = reference_tokens(model, tokenizer, iter_examples(examples), config)
    manifest = MemoryManifest(
        base_model=identify(model, routers),
        tokenizer=identify_tokenizer(tokenizer),
        build=config,
        routing=config.routing(),
        router_sketch=sketch_weights(routers),
        router_digests=layer_digests(routers),
    )
    shapes = {
        router.layer: LayerShape(router.hidden_size, router.num_experts, _key_dtype(model))
        for router in routers
    }
    plan = make_plan(manifest, reference.provenance, shapes)
    with Workspace(to.target, plan, overwrite=to.overwrite, durable=to.durable) as workspace:
        if not workspace.published:
            with BuildCheckpoint(workspace, manifest, reference.provenance, shapes) as checkpoint:
                forget_compiled_graphs()
                with freeze(model), use_grouped_experts(model):
                    _fill(model, routers, reference, checkpoint, on_progress)
                total = len(reference.provenance.stream)
                on_progress(Progress("sealing", 0, total))
                checkpoint.publish(routers[0].device, keep=to.part)
                on_progress(Progress("sealing", total, total))
        elif not to.part:
            workspace.remove()
    return RoutingMemory.from_pretrained(to.target, verify=False)


def _fill(
    model: nn.Module,
    routers: list[Router],
    reference: ReferenceTokens,
    checkpoint: BuildCheckpoint,
    on_progress: OnProgress,
) -> None:
    """Compute and write every batch that is not on disk yet."""
    config = checkpoint.manifest.build
    device = input_device(model)
    done, resumed, total = 0, 0, len(reference.provenance.stream)
    with BackgroundWriter(checkpoint.writer, _key_dtype(model)) as background:
        for number, batch in enumerate(reference.batches(config.batch_tokens)):
            tokens = int(batch.real.sum())
            done += tokens
            if checkpoint.has(number, batch):
                resumed += tokens
                on_progress(Progress("resuming", resumed, total))
                continue
            with batch_fits(config, batch):
                layers = optimise_routing(model, routers, batch.to(device), config)
            background.submit(layers, batch, partial(checkpoint.mark, number))
            on_progress(Progress("optimising", done, total))


def batch_fits(config: BuildConfig, batch: Batch) -> AbstractContextManager[None]:
    """Explain how to make batches smaller where the code inside runs out of memory."""
    rows, length = batch.ids.shape
    return explain_out_of_memory(
        f"A batch of {rows} × {length} tokens did not fit in memory beside the model. Lower "
        f"batch_tokens (now {config.batch_tokens}) or max_length (now {config.max_length})."
    )


def reference_tokens(
    model: nn.Module, tokenizer: Any, examples: Iterable[Example], config: BuildConfig
) -> ReferenceTokens:
    """Read examples as a memory of them has them: in windows that the model can read.

    Raises:
        ReferenceSetError: There are no tokens, or the model does not know some of them.
    """
    reference = read_tokens(examples, tokenizer, config, _window_length(model, config))
    _check_vocabulary(model, reference)
    return reference


def choice_tokens(
    model: nn.Module, tokenizer: Any, examples: Sequence[Example], config: BuildConfig
) -> ReferenceTokens:
    """Read examples as `reference_tokens` does, with their distractors if they have some: then
    completions alone are scored."""
    if any(example.distractors for example in examples):
        config = replace(config, loss="completion")
    reference = reference_tokens(model, tokenizer, examples, config)
    return add_distractors(reference, examples, tokenizer, _window_length(model, config))


def _window_length(model: nn.Module, config: BuildConfig) -> int:
    return min(config.max_length, max_positions(model) or config.max_length)


def _check_vocabulary(model: nn.Module, reference: ReferenceTokens) -> None:
    largest = int(reference.provenance.stream.max())
    known = unwrap(model).get_input_embeddings().weight.shape[0]
    if largest >= known:
        raise ReferenceSetError(
            f"The tokenizer gives token {largest}, and the model knows {known} tokens. Use the "
            f"model's own tokenizer."
        )


def _key_dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
