"""Append examples to a memory: build the new cases apart, then write both as one memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from knn_moe.build.build import Destination, build_to, reference_tokens
from knn_moe.build.checkpoint import digest_reference
from knn_moe.build.workspace import Workspace, discard
from knn_moe.config import BuildConfig, as_json
from knn_moe.errors import MemoryMismatchError
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.load import Examples, iter_examples
from knn_moe.reference.provenance import owners, same_places
from knn_moe.support.progress import OnProgress, ignore_progress


def append(
    memory: RoutingMemory,
    model: nn.Module,
    tokenizer: Any,
    examples: Examples,
    config: BuildConfig,
    *,
    folder: Path,
    overwrite: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> RoutingMemory:
    """Write `memory` and the cases of `examples` to `folder` as one memory.

    If `folder` is the memory's own and it holds all the examples, nothing changes: a job that was
    killed as it ended can be repeated.

    Args:
        memory: The memory to append to.
        model: The model that it was built for.
        tokenizer: The model's tokenizer.
        examples: All that `load_examples` takes and that can be read twice: no iterator.
        config: How to build the new cases.
        folder: Where the whole memory is written.
        overwrite: As in `build_memory`.
        on_progress: As in `build_memory`.

    Returns:
        The whole memory, opened from `folder`.

    Raises:
        BuildError, MemoryFormatError, ReferenceSetError, ModelTooLargeError: As in `build_memory`.
        MemoryMismatchError: The memory was built otherwise, or of these very examples.
    """
    new = reference_tokens(model, tokenizer, iter_examples(examples), config).provenance
    in_place = memory.folder is not None and memory.folder.resolve() == folder.resolve()
    if in_place and bool(torch.isin(owners(new), owners(memory.provenance)).all()):
        discard(folder)
        return memory
    if same_places(new, memory.provenance):
        raise MemoryMismatchError(
            "The memory holds exactly these examples already. There is nothing to append."
        )
    plan = {
        "append_to": digest_reference(memory.provenance),
        "gammas": {str(index): layer.gamma for index, layer in memory.layers.items()},
        "build": as_json(config),
        "reference": digest_reference(new),
    }
    with Workspace(folder, plan, overwrite=overwrite) as workspace:
        if not workspace.published:
            to = Destination(target=workspace.root / "new", part=True)
            cases = build_to(to, model, tokenizer, examples, config, on_progress)
            memory.merge(cases, folder=workspace.free("memory"))
            workspace.publish(workspace.root / "memory")
        else:
            workspace.remove()
    return RoutingMemory.from_pretrained(workspace.target, verify=False)
