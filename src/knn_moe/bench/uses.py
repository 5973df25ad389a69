"""The ways to use a memory that are compared in a running model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from knn_moe.bench.search import describe_index
from knn_moe.config import HeadConfig, IndexConfig, RoutingConfig
from knn_moe.index.exact import spread_evenly
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.layers import LayerMemory
from knn_moe.memory.memory import RoutingMemory

RECOMMENDED_K: Final = 32  # what calibration chooses most often
RECOMMENDED_PROTOTYPES: Final = 1024
_UPDATE: Final = 0.1  # of the router's logits


@dataclass(frozen=True, kw_only=True)
class Use:
    """One way to use a memory: its cases by an index, or distilled to prototypes."""

    config: RoutingConfig
    prototypes: int | None = None  # None: the cases

    @property
    def name(self) -> str:
        if self.prototypes is not None:
            return f"distilled, P = {self.prototypes:,}"
        index = describe_index(self.config.index or IndexConfig())
        head = f", head of {self.config.head.k}" if self.config.head else ""
        return f"{index}, K = {self.config.k}{head}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return {"prototypes": self.prototypes, "routing": self.config.to_dict()}

    def of(self, memory: RoutingMemory) -> RoutingMemory:
        """Return the memory in the form that is used."""
        if self.prototypes is None:
            return memory
        layers = {
            index: _distilled(layer, self.prototypes)
            for index, layer in memory.full_layers().items()
        }
        return replace(memory, layers=layers, folder=None)


def recommended_uses(k: int, prototypes: tuple[int, ...]) -> tuple[Use, ...]:
    """Return what distilling and calibrating recommend, and what it is compared with."""
    fast, exact = IndexConfig(kind="fast"), IndexConfig()
    distilled = tuple(
        Use(config=RoutingConfig(spare_first_token=True), prototypes=count) for count in prototypes
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


def _distilled(layer: LayerMemory, prototypes: int) -> DistilledLayer:
    """Return prototypes at some of the cases, with small random updates."""
    rows = spread_evenly(prototypes, len(layer))
    keys, experts = layer.keys[rows], layer.values.shape[1]
    draw = torch.Generator().manual_seed(0)
    linear = torch.randn(experts, keys.shape[1], generator=draw) / keys.shape[1]
    return DistilledLayer(
        keys=keys,
        updates=_UPDATE * torch.randn(len(rows), experts, generator=draw),
        linear=linear.to(keys.dtype),
        cases=rows,
        gamma=layer.gamma,
        log_threshold=-2.0,
    )
