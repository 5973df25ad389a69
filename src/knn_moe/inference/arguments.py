"""What is given to attach: say what it is where it is not what it should be, and open memories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from torch import nn

from knn_moe.config import RoutingConfig
from knn_moe.errors import AttachError
from knn_moe.memory.memory import RoutingMemory
from knn_moe.support.given import describe, say_no_model

MemoryLike: TypeAlias = RoutingMemory | str | Path
_WANTED: Final = "a RoutingMemory, or the folder or hub id of one"


def check_model(model: object) -> None:
    """Raise AttachError, which says what was given, if `model` is no model."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, RoutingMemory):
        raise AttachError(
            f"The model comes first, and the memory second: got {model!r} as the model."
        )
    raise AttachError(say_no_model(model))


def check_config(config: object) -> None:
    """Raise AttachError, which says what was given, if `config` is neither None nor a config."""
    if config is not None and not isinstance(config, RoutingConfig):
        raise AttachError(
            f"A memory is used as a RoutingConfig says, and {describe(config)} is none. Give "
            f"RoutingConfig(…), or leave it out to use the memory as it says itself."
        )


def check_memory(memory: object) -> None:
    """Raise AttachError, which says what was given, if `memory` is neither a memory nor a name."""
    if not isinstance(memory, RoutingMemory | str | Path):
        several = isinstance(memory, Mapping | list | tuple)
        hint = " For several memories there is attach_all(model, {name: memory, …})." * several
        raise AttachError(f"A memory is {_WANTED}, and {describe(memory)} is neither.{hint}")


def check_memories(memories: object) -> None:
    """Raise AttachError, which says what was given, if `memories` are not memories by name."""
    if not isinstance(memories, Mapping):
        raise AttachError(
            f"attach_all takes memories by name, {{name: memory, …}}, and {describe(memories)} is "
            f"no such mapping."
        )
    for name, memory in memories.items():
        if not isinstance(name, str):
            raise AttachError(f"Memories are named by texts, and {describe(name)} is none.")
        check_memory(memory)


def open_memory(memory: MemoryLike) -> RoutingMemory:
    """Return the memory, opened if a folder or a hub id names it.

    Raises:
        MemoryFormatError: There is no memory, or a damaged one.
    """
    return memory if isinstance(memory, RoutingMemory) else RoutingMemory.from_pretrained(memory)
