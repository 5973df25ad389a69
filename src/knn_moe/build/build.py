"""Memory construction (§4.1): read a reference set once and stream what it teaches to disk.

Puts together the reference tokens (batches.py), the optimisation (optimise.py) and the writer.
Batches are of many sequences of like length; while one is written, the next is computed. Peak
memory is that of two batches and the reference's token ids, however many keys there are. A killed
build goes on where it stopped: a journal names the batches whose rows are on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from knn_moe.build.background_writer import BackgroundWriter
from knn_moe.build.checkpoint import BuildCheckpoint
from knn_moe.build.optimise import optimise_routing
from knn_moe.config import BuildConfig
from knn_moe.errors import BuildError, ModelTooLargeError, ReferenceSetError
from knn_moe.memory.files import refuse_existing
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.memory.memory import RoutingMemory
from knn_moe.memory.writer import LayerShape
from knn_moe.reference.examples import Example, ExampleLike, iter_examples
from knn_moe.reference.windows import ReferenceTokens, make_batch, plan_batches, read_tokens
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.fingerprint import identify, identify_tokenizer
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.intercept import find_hook
from knn_moe.routers.model_state import (
    forget_compiled_graphs,
    freeze,
    input_device,
    max_positions,
    unwrap,
)
from knn_moe.support.files import TemporaryFolder


@dataclass(frozen=True)
class BuildProgress:
    """How far a build is, for whoever shows it."""

    stage: str  # "optimise"; then "seal": distances for γ, and checksums; then "done"
    tokens: int
    total_tokens: int
    resumed_tokens: int  # of `tokens`, those an earlier run had done
    seconds: float  # since this run began


def build_memory(
    model: nn.Module,
    tokenizer: Any,
    examples: str | Path | Iterable[ExampleLike],
    config: BuildConfig | None = None,
    *,
    folder: str | Path | None = None,
    on_progress: Callable[[BuildProgress], None] | None = None,
) -> RoutingMemory:
    """Build a memory of `examples` for `model`, which is left as it was.

    The memory is streamed to `folder` and opened from there, memory-mapped. If a build of the
    same model, reference set and config was killed on its way to that folder, it goes on.
    Without a folder a temporary one is used, which lives as long as the memory.
    """
    config = config or BuildConfig()
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper would trace our hooks
    holds = TemporaryFolder() if folder is None else None
    target = holds.path / "memory" if holds else Path(str(folder))
    refuse_existing(target, overwrite=False)
    routers = find_routers(model)
    if any(find_hook(router) for router in routers):
        raise BuildError("The model has a memory attached: detach it before building another.")
    reference = reference_tokens(model, tokenizer, iter_examples(examples), config)
    manifest = MemoryManifest(
        base_model=identify(model, routers),
        tokenizer=identify_tokenizer(tokenizer),
        build=config,
        routing=config.routing(),
    )
    dtype = _key_dtype(model)
    shapes = {
        router.layer: LayerShape(router.hidden_size, router.num_experts, dtype)
        for router in routers
    }
    report = on_progress or (lambda _: None)
    with BuildCheckpoint(target, manifest, reference.provenance, shapes) as checkpoint:
        progress = _Progress(reference, report)
        forget_compiled_graphs()
        with freeze(model), use_grouped_experts(model):
            _fill(model, routers, reference, checkpoint, progress)
        progress.report("seal")
        checkpoint.publish(manifest, device=routers[0].device)
        progress.report("done")
    return replace(RoutingMemory.from_pretrained(target, verify=False), _holds=holds)


class _Progress:
    def __init__(self, reference: ReferenceTokens, send: Callable[[BuildProgress], None]) -> None:
        self.total = len(reference.provenance.stream)
        self.send = send
        self.start = time.monotonic()
        self.done = self.resumed = 0

    def skip(self, tokens: int) -> None:
        self.done += tokens
        self.resumed += tokens

    def add(self, tokens: int) -> None:
        self.done += tokens
        self.report("optimise")

    def report(self, stage: str) -> None:
        seconds = time.monotonic() - self.start
        self.send(BuildProgress(stage, self.done, self.total, self.resumed, seconds))


def _fill(
    model: nn.Module,
    routers: list[Router],
    reference: ReferenceTokens,
    checkpoint: BuildCheckpoint,
    progress: _Progress,
) -> None:
    """Compute and write every batch that is not on disk yet."""
    config = checkpoint.manifest.build
    device = input_device(model)
    with BackgroundWriter(checkpoint.writer, _key_dtype(model)) as background:
        for number, windows in enumerate(plan_batches(reference.lengths, config.batch_tokens)):
            batch, rows = make_batch(reference, windows)
            tokens = int(batch.real.sum())
            if number in checkpoint.finished:
                progress.skip(tokens)
                continue
            with fitting(config, tuple(batch.ids.shape)):
                cases = optimise_routing(model, routers, batch.to(device), config)
            background.submit(cases, rows, partial(checkpoint.mark, number))
            progress.add(tokens)


@contextmanager
def fitting(config: BuildConfig, shape: tuple[int, ...]) -> Iterator[None]:
    """Running out of memory, said in words."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        exhausted = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if exhausted or "can't allocate memory" in str(error):
            raise _too_large(config, shape) from None
        raise


def _too_large(config: BuildConfig, shape: tuple[int, ...]) -> ModelTooLargeError:
    return ModelTooLargeError(
        f"A batch of {shape[0]} × {shape[1]} tokens did not fit in memory beside the model. "
        f"Lower batch_tokens (now {config.batch_tokens}) or max_length (now {config.max_length})."
    )


def reference_tokens(
    model: nn.Module, tokenizer: Any, examples: Iterable[Example], config: BuildConfig
) -> ReferenceTokens:
    """The tokens of a reference set as a memory of it has them, in windows the model can read."""
    reference = read_tokens(examples, tokenizer, config, _window(model, config))
    _check_vocabulary(model, reference)
    return reference


def _window(model: nn.Module, config: BuildConfig) -> int:
    """Tokens in a window: no more than the model has positions for."""
    return min(config.max_length, max_positions(model) or config.max_length)


def _check_vocabulary(model: nn.Module, reference: ReferenceTokens) -> None:
    largest = int(reference.provenance.stream.max())
    known = unwrap(model).get_input_embeddings().weight.shape[0]
    if largest >= known:
        raise ReferenceSetError(
            f"The tokenizer gives token {largest}, and the model knows {known}: they do not belong "
            f"together."
        )


def _key_dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
