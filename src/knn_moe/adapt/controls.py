"""Memories that should not help, to hold against one that does.

    attach(model, control(memory, "random", model))

Each takes one thing from a memory and leaves the rest: the match of values to keys ("shuffled"),
the choice of neighbours ("random"), what the optimisation found ("own-logits"). Knows memories and
their routers; nothing of how a result is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final, Protocol

import torch
from torch import nn

from knn_moe.errors import ConfigError, MemoryMismatchError
from knn_moe.inference.attach import check_belongs
from knn_moe.memory.memory import RoutingMemory
from knn_moe.routers.find import find_routers
from knn_moe.routers.own_logits import compute_own_logits


class Make(Protocol):
    """What a control does to a memory."""

    def __call__(self, memory: RoutingMemory, model: nn.Module | None, seed: int) -> RoutingMemory:
        """May refuse to do without a model."""
        ...


def shuffle_values(memory: RoutingMemory, seed: int = 0) -> RoutingMemory:
    """The same cases, each with the value of a case drawn at random: recalled for no reason.

    One permutation for all layers, so that what a case brings to one layer still fits what it
    brings to the next. Keys and γ are shared with `memory`; values are held in working memory.
    """
    order = torch.randperm(len(memory), generator=torch.Generator().manual_seed(seed))
    layers = {
        index: replace(layer, values=layer.values[order.to(layer.values.device)])
        for index, layer in memory.full_layers().items()
    }
    # What lies in the memory's folder is not what this one holds.
    return replace(memory, layers=layers, folder=None)


def random_neighbours(memory: RoutingMemory, seed: int = 0) -> RoutingMemory:
    """The same cases, K drawn at random for each token and layer in the place of the K nearest.

    λ and the weights stay those of the nearest. Unlike shuffled values, what a token recalls is not
    what the next token like it recalls. Said by the memory's routing: `RoutingConfig.drawn`.
    """
    routing = replace(memory.routing, drawn=seed)
    return replace(memory, manifest=replace(memory.manifest, routing=routing), folder=None)


def own_values(memory: RoutingMemory, model: nn.Module) -> RoutingMemory:
    """The same cases, each with the logits its router gives it: what a build of no steps remembers.

    A token then leans on its neighbours' routing as it was, not as it should have been. Values are
    held in working memory.
    """
    routers = {router.layer: router for router in find_routers(model)}
    layers = {}
    for index, layer in memory.full_layers().items():
        router = routers.get(index)
        if router is None or router.hidden_size != layer.shape.hidden_size:
            raise MemoryMismatchError(
                f"The memory's layer {index} has no router in the model that reads its keys of "
                f"{layer.shape.hidden_size} numbers."
            )
        layers[index] = replace(layer, values=compute_own_logits(router, layer.keys))
    return replace(memory, layers=layers, folder=None)


@dataclass(frozen=True)
class Control:
    """A control there is: what it does, in a few words, and how it is made."""

    title: str
    make: Make


def _shuffled(memory: RoutingMemory, model: nn.Module | None, seed: int) -> RoutingMemory:
    return shuffle_values(memory, seed)


def _random(memory: RoutingMemory, model: nn.Module | None, seed: int) -> RoutingMemory:
    return random_neighbours(memory, seed)


def _own(memory: RoutingMemory, model: nn.Module | None, seed: int) -> RoutingMemory:
    if model is None:
        raise ConfigError(
            "The control 'own-logits' asks the model's routers: control(memory, 'own-logits', "
            "model)."
        )
    return own_values(memory, model)


CONTROLS: Final[Mapping[str, Control]] = {
    "shuffled": Control("values shuffled", _shuffled),
    "random": Control("neighbours drawn at random", _random),
    "own-logits": Control("the router's own logits as values", _own),
}


def control_named(kind: str) -> Control:
    found = CONTROLS.get(kind)
    if found is None:
        meant = get_close_matches(kind, CONTROLS, n=1)
        hint = f" Did you mean {meant[0]!r}?" if meant else ""
        raise ConfigError(f"Unknown control {kind!r}.{hint} Available: {', '.join(CONTROLS)}.")
    return found


def control(
    memory: RoutingMemory,
    kind: str,
    model: nn.Module | None = None,
    *,
    seed: int = 0,
    force: bool = False,
) -> RoutingMemory:
    """`memory` with one thing taken from it: `kind` is one of CONTROLS.

    `model` is whom the memory belongs to; "own-logits" cannot do without. `seed` is of what is
    drawn. `force` takes a memory that was built for another model of the same shape.
    """
    found = control_named(kind)
    if model is not None and not force:
        check_belongs(model, memory)
    return found.make(_routing_only(memory), model, seed)


def _routing_only(memory: RoutingMemory) -> RoutingMemory:
    """Without a head, which would go on telling what followed the nearest cases."""
    routing = replace(memory.routing, head=None)
    return replace(memory, manifest=replace(memory.manifest, routing=routing))
