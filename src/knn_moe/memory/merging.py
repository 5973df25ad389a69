"""Whether memories can be merged, and what is said of the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from knn_moe.config import as_json
from knn_moe.errors import MemoryMismatchError
from knn_moe.memory.manifest import join_scores
from knn_moe.reference.provenance import owners, same_places

if TYPE_CHECKING:
    from knn_moe.memory.memory import RoutingMemory

# Settings that change no case, and one that is joined.
_NO_MATTER: Final = ("batch_tokens", "loss", "stats", "spare_first_token")


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


def refuse_one_memory_twice(memories: Sequence[RoutingMemory]) -> None:
    """Raise MemoryMismatchError if two of the memories are one: every case would be there twice."""
    for (here, first), (there, second) in combinations(enumerate(memories), 2):
        if _in_one_folder(first, second) or _have_same_cases(first, second):
            names = f"{_name(first, here)} and {_name(second, there)}"
            raise MemoryMismatchError(
                f"{names} are the same memory: every case would be there twice. Name each "
                f"memory once."
            )


def _in_one_folder(first: RoutingMemory, second: RoutingMemory) -> bool:
    folders = [each.folder.resolve() for each in (first, second) if each.folder is not None]
    return first is second or (len(folders) == 2 and folders[0] == folders[1])


def _have_same_cases(first: RoutingMemory, second: RoutingMemory) -> bool:
    if not len(first) or not same_places(first.provenance, second.provenance):
        return False
    layers, others = first.full_layers(), second.full_layers()
    return all(torch.equal(layers[index].values, others[index].values) for index in layers)


def differing_settings(memories: Sequence[RoutingMemory]) -> str | None:
    """Say which settings differ and whose hold; None if all memories have the same."""
    first, *others = [_settings(memory) for memory in memories]
    differing = {
        name: value
        for name, value in first.items()
        if any(other[name] != value for other in others)
    }
    if not differing:
        return None
    name_of_first = _name(memories[0], 0)
    told = [
        ", ".join(
            [
                f"{name} {_shown(value)} in {name_of_first}",
                *(
                    f"{_shown(other[name])} in {_name(memories[number], number)}"
                    for number, other in enumerate(others, 1)
                    if other[name] != value
                ),
            ]
        )
        for name, value in differing.items()
    ]
    return (
        f"The memories have different settings: {'; '.join(told)}. Each case keeps the value it "
        f"was built with. The merged memory has the settings of {name_of_first}."
    )


def _settings(memory: RoutingMemory) -> dict[str, Any]:
    """Return what a merge may have to choose between: not what it drops."""
    manifest = memory.manifest.without_calibration()
    settings = {**as_json(manifest.build), **as_json(manifest.routing)}
    settings["control seed"] = manifest.random_seed
    return {name: value for name, value in settings.items() if name not in _NO_MATTER}


def describe_merge(memories: Sequence[RoutingMemory]) -> list[str]:
    """Say in sentences what a merge of `memories` keeps, computes again and drops."""
    return [*_describe_kept(memories), *_describe_dropped(memories)]


def _describe_kept(memories: Sequence[RoutingMemory]) -> Iterator[str]:
    first = memories[0]
    build, routing = first.build, first.manifest.without_calibration().routing
    steps = "1 step" if build.steps == 1 else f"{build.steps} steps"
    yield (
        f"Kept: all {sum(map(len, memories)):,} cases with their values, and the settings of "
        f"{_name(first, 0)}: preset {build.preset}, {steps} of {build.learning_rate:g} "
        f"to build; K = {routing.k} and {routing.similarity} similarity to recall."
    )
    sparing = _names(memories, [memory.routing.spare_first_token for memory in memories])
    if sparing and not routing.spare_first_token:
        yield f"Also kept: first tokens are left to the router, as in {sparing}."
    repeated = _count_repeated(memories)
    if repeated:
        yield (
            f"{repeated:,} examples are in more than one of the memories. Their cases are kept "
            f"each time."
        )
    if len(memories) > 1:
        yield "Computed again: the width (γ) of each layer, from the cases of all."


def _describe_dropped(memories: Sequence[RoutingMemory]) -> Iterator[str]:
    calibrated = [memory.manifest.calibration is not None for memory in memories]
    if any(calibrated):
        heads = [
            has and memory.routing.head is not None
            for has, memory in zip(calibrated, memories, strict=True)
        ]
        head = f", and the language-model head of {_names(memories, heads)}" if any(heads) else ""
        yield f"Dropped: the calibration of {_names(memories, calibrated)}{head}."
    trained = [memory.manifest.values_trained for memory in memories]
    if any(trained):
        yield (
            f"The values of {_names(memories, trained)} stay as calibration trained them. "
            f"To calibrate the result, name a reference set of other examples."
        )
    elif any(calibrated):
        yield "Run knn-moe calibrate on the result."


def _count_repeated(memories: Sequence[RoutingMemory]) -> int:
    """Return how many examples are in more than one memory."""
    each = [owners(memory.provenance).unique() for memory in memories]
    _, counts = torch.cat(each).unique(return_counts=True)
    return int((counts > 1).sum())


def _names(memories: Sequence[RoutingMemory], which: Sequence[bool]) -> str:
    named = [_name(memory, number) for number, memory in enumerate(memories) if which[number]]
    return " and ".join(named)


def _name(memory: RoutingMemory, number: int) -> str:
    """Return the folder that the user knows the memory by, or its place in the order given."""
    known = memory.folder is not None and memory._holds is None
    return repr(str(memory.folder)) if known else f"memory {number + 1}"


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


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
