"""The ways to use a memory that are compared in a running model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import torch
from torch import nn

from knn_moe.bench.search import describe_index
from knn_moe.config import HeadConfig, IndexConfig, RoutingConfig
from knn_moe.index.exact import spread_evenly
from knn_moe.inference.attach import Routing, attach
from knn_moe.inference.several import Memories, attach_all
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.layers import LayerMemory
from knn_moe.memory.memory import RoutingMemory

_UPDATE: Final = 0.1  # of the router's logits


@dataclass(frozen=True, kw_only=True)
class Use:
    """One way to use a memory: its cases by an index, or distilled to prototypes. There may be
    several memories, of which the rows of a batch use one after the other."""

    config: RoutingConfig
    prototypes: int | None = None  # None: the cases
    memories: int = 1

    @property
    def name(self) -> str:
        if self.prototypes is not None:
            times = f"{self.memories} × " if self.memories > 1 else ""
            return f"{times}distilled, P = {self.prototypes:,}"
        index = describe_index(self.config.index or IndexConfig())
        head = f", head of {self.config.head.k}" if self.config.head else ""
        return f"{index}, K = {self.config.k}{head}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        form = {"prototypes": self.prototypes, "memories": self.memories}
        return {**form, "routing": self.config.to_dict()}

    def attach(self, model: nn.Module, memory: RoutingMemory) -> Attached:
        """Put the memory on a model as it is used."""
        if self.memories == 1:
            return Attached(attach(model, self._of(memory), self.config))
        several = {str(number): self._of(memory, number) for number in range(self.memories)}
        configs = dict.fromkeys(several, self.config)
        return Attached(attach_all(model, several, configs), list(several))

    def _of(self, memory: RoutingMemory, seed: int = 0) -> RoutingMemory:
        """Return the memory in the form that is used."""
        if self.prototypes is None:
            return memory
        return distilled_memory(memory, self.prototypes, seed)


@dataclass(frozen=True)
class Attached:
    """A handle, or none, and the names of its memories where there are several."""

    handle: Routing | Memories | None = None
    names: Sequence[str] = ()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        if self.handle is not None:
            self.handle.detach()

    def rows(self, batch: int) -> AbstractContextManager[None]:
        """Let each row of a batch use another memory inside, as far as there are others."""
        if not isinstance(self.handle, Memories):
            return nullcontext()
        return self.handle.using([self.names[row % len(self.names)] for row in range(batch)])


def recommended_uses(
    k: int, prototypes: tuple[int, ...], memories: tuple[int, ...] = ()
) -> tuple[Use, ...]:
    """Return what distilling and calibrating recommend, and what it is compared with."""
    fast, exact = IndexConfig(kind="fast"), IndexConfig()
    config = RoutingConfig(spare_first_token=True)
    distilled = tuple(
        Use(config=config, prototypes=count, memories=times)
        for count, times in product(prototypes, (1, *memories))
    )
    searched = (
        RoutingConfig(k=k, index=fast, spare_first_token=True),
        RoutingConfig(k=k, index=fast, spare_first_token=True, head=HeadConfig()),
        RoutingConfig(k=k, index=exact, spare_first_token=True),
        RoutingConfig(k=1, index=fast, spare_first_token=True),
    )
    return (*distilled, *(Use(config=config) for config in dict.fromkeys(searched)))


def chosen_uses(k: int, indexes: tuple[IndexConfig, ...]) -> tuple[Use, ...]:
    """Return one use for each index."""
    return tuple(
        Use(config=RoutingConfig(k=k, index=index, spare_first_token=True)) for index in indexes
    )


def distilled_memory(memory: RoutingMemory, prototypes: int, seed: int = 0) -> RoutingMemory:
    """Return a memory with this many prototypes in each layer, which nobody has trained."""
    layers = {
        index: _distilled(layer, prototypes, seed) for index, layer in memory.full_layers().items()
    }
    return replace(memory, layers=layers, folder=None)


def _distilled(layer: LayerMemory, prototypes: int, seed: int) -> DistilledLayer:
    """Return prototypes at some of the cases, with small random updates."""
    rows = spread_evenly(prototypes, len(layer))
    keys, experts = layer.keys[rows], layer.values.shape[1]
    draw = torch.Generator().manual_seed(seed)
    linear = torch.randn(experts, keys.shape[1], generator=draw) / keys.shape[1]
    return DistilledLayer(
        keys=keys,
        updates=_UPDATE * torch.randn(len(rows), experts, generator=draw),
        linear=linear.to(keys.dtype),
        cases=rows,
        gamma=layer.gamma,
        log_threshold=-2.0,
    )
