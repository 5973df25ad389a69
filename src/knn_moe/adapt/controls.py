"""Controls: memories that should not help, to compare a memory with that does.

    attach(model, control(memory, "random", model))

Each takes one thing from a memory and leaves the rest: the match of values to keys ("shuffled"),
the choice of neighbours ("random"), what the optimisation found ("own-logits"). Knows memories and
their routers; nothing of how a result is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import nn

from knn_moe.errors import ConfigError, MemoryMismatchError
from knn_moe.inference.arguments import MemoryLike, open_memory
from knn_moe.inference.attach import check_belongs
from knn_moe.memory.memory import RoutingMemory
from knn_moe.routers.find import find_routers
from knn_moe.routers.own_logits import compute_own_logits
from knn_moe.support.registry import Registry


class MakeControl(Protocol):
    """Makes a control of a memory. May need the model."""

    def __call__(
        self, memory: RoutingMemory, model: nn.Module | None, seed: int
    ) -> RoutingMemory: ...


def shuffle_values(
    memory: RoutingMemory, model: nn.Module | None = None, seed: int = 0
) -> RoutingMemory:
    """Give each case the value of a case drawn at random.

    One permutation for all layers, so that what a case brings to one layer still fits what it
    brings to the next. Keys and γ are shared with `memory`; values are held in working memory.
    """
    order = torch.randperm(len(memory), generator=torch.Generator().manual_seed(seed))
    layers = {
        index: replace(layer, values=layer.values[order.to(layer.values.device)])
        for index, layer in memory.full_layers().items()
    }
    # The memory's folder does not hold what this one holds.
    return replace(memory, layers=layers, folder=None)


def draw_neighbours(
    memory: RoutingMemory, model: nn.Module | None = None, seed: int = 0
) -> RoutingMemory:
    """Recall K cases drawn at random for each token and layer in place of the K nearest.

    λ and the weights stay those of the nearest. Unlike with shuffled values, two similar tokens
    recall different cases.
    """
    manifest = replace(memory.manifest, random_seed=seed)
    return replace(memory, manifest=manifest, folder=None)


def use_own_logits(
    memory: RoutingMemory, model: nn.Module | None = None, seed: int = 0
) -> RoutingMemory:
    """Give each case the logits that its router gives the key: what a build of no steps remembers.

    A token then follows its neighbours' routing as it was, not as it should have been. Values are
    held in working memory.
    """
    if model is None:
        raise ConfigError(
            "The control 'own-logits' needs the model: control(memory, 'own-logits', model)."
        )
    routers = {router.layer: router for router in find_routers(model)}
    layers = {}
    for index, layer in memory.full_layers().items():
        router = routers.get(index)
        if router is None or router.hidden_size != layer.shape.hidden_size:
            raise MemoryMismatchError(
                f"The model has no router in layer {index} that reads keys of "
                f"{layer.shape.hidden_size} numbers, as the memory's are."
            )
        layers[index] = replace(layer, values=compute_own_logits(router, layer.keys))
    return replace(memory, layers=layers, folder=None)


@dataclass(frozen=True)
class Control:
    """A control: what it changes, in a few words, and how it is made."""

    title: str
    make: MakeControl
    needs_keys: bool = True  # which a compressed memory does not have


CONTROLS: Final = Registry(
    "control",
    {
        "shuffled": Control("values shuffled", shuffle_values),
        "random": Control("neighbours drawn at random", draw_neighbours, needs_keys=False),
        "own-logits": Control("the router's own logits as values", use_own_logits),
    },
)


def control(
    memory: MemoryLike,
    kind: str,
    model: nn.Module | None = None,
    *,
    seed: int = 0,
    force: bool = False,
) -> RoutingMemory:
    """Make a control of `memory`.

    It has no language-model head, which would still tell what followed the nearest cases.

    Args:
        memory: The memory to compare with, or its folder or hub id.
        kind: "shuffled", "random" or "own-logits".
        model: The model that the memory belongs to. "own-logits" needs it.
        seed: For what is drawn at random.
        force: Also take a memory that was built for another model of the same shape.

    Returns:
        The control, which is attached and evaluated like any memory.

    Raises:
        ConfigError: There is no such control, or the model is missing.
        MemoryMismatchError: The memory belongs to another model.
    """
    found, memory = CONTROLS.find(kind), open_memory(memory)
    if model is not None and not force:
        check_belongs(model, memory)
    routing = replace(memory.routing, head=None)
    without_head = replace(memory, manifest=replace(memory.manifest, routing=routing))
    return found.make(without_head, model, seed)
