"""Whether memories can be merged, and what is said of the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from knn_moe.errors import MemoryMismatchError
from knn_moe.memory.manifest import join_scores
from knn_moe.reference.provenance import owners

if TYPE_CHECKING:
    from knn_moe.memory.memory import RoutingMemory


def join_pruned(memories: Sequence[RoutingMemory]) -> dict[str, Any] | None:
    """Say what pruning left of all memories together; None if none was pruned."""
    cut = [memory.manifest.pruned for memory in memories if memory.manifest.pruned]
    if not cut:
        return None
    cases = sum((memory.manifest.pruned or {}).get("cases", len(memory)) for memory in memories)
    score = join_scores([facts["score"] for facts in cut])
    rounds = max(facts["rounds"] for facts in cut)
    return {"cases": cases, "kept": sum(map(len, memories)), "score": score, "rounds": rounds}


def refuse_merging_again(memories: Sequence[RoutingMemory], folder: Path) -> None:
    """Raise MemoryMismatchError if the memory in `folder` holds the examples of the others: it is
    what this merge has written before."""
    for memory in memories:
        if memory.folder is None or memory.folder.resolve() != folder.resolve():
            continue
        here = owners(memory.provenance)
        others = [owners(other.provenance) for other in memories if other is not memory]
        if others and bool(torch.isin(torch.cat(others), here).all()):
            raise MemoryMismatchError(
                f"The memory in {str(folder)!r} holds all examples of the others already. There is "
                f"nothing to merge."
            )


def check_mergeable(first: RoutingMemory, other: RoutingMemory) -> None:
    """Raise MemoryMismatchError if two memories are of different models, or built otherwise."""
    if first.base_model.fingerprint != other.base_model.fingerprint:
        raise MemoryMismatchError(
            f"These memories belong to different models, {first.base_model} and "
            f"{other.base_model}, and cannot be merged."
        )
    for name, verb in (("tokens", "keeps"), ("loss", "lowers the loss of")):
        mine, theirs = (getattr(each.build, name) or each.build.tokens for each in (first, other))
        if mine != theirs:
            raise MemoryMismatchError(
                f"One of these memories {verb} {mine} tokens and the other {theirs} tokens. Build "
                f"them alike to merge them."
            )
    shapes, others = (
        {index: layer.shape for index, layer in memory.layers.items()} for memory in (first, other)
    )
    if shapes != others:
        raise MemoryMismatchError(
            f"These memories hold different layers or precisions ({sorted(shapes)} and "
            f"{sorted(others)}) and cannot be merged. Build them alike."
        )
