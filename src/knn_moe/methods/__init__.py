"""Ways to answer: a model as it is, or with something put on it for a while."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from knn_moe.config import RoutingConfig
from knn_moe.handle import attach
from knn_moe.memory import RoutingMemory


class Method(Protocol):
    """What is compared. `on` puts it on a model until the context is left."""

    @property
    def name(self) -> str: ...

    def facts(self) -> Mapping[str, Any]:
        """What a reader of the results must know, as JSON takes it."""

    def on(self, model: nn.Module) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class ZeroShot:
    """The model alone."""

    name: str = "zero-shot"

    def facts(self) -> Mapping[str, Any]:
        return {}

    def on(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True)
class KnnMoe:
    """The model with a routing memory."""

    memory: RoutingMemory = field(repr=False)
    config: RoutingConfig | None = None  # None: the memory's own
    name: str = "knn"

    def facts(self) -> Mapping[str, Any]:
        config = self.config or self.memory.routing
        return {
            "cases": len(self.memory),
            # A kernel's width comes from all keys of its layer: it tells memories apart.
            "gamma": {str(place): layer.gamma for place, layer in self.memory.layers.items()},
            "build": self.memory.build.to_dict(),
            "routing": config.to_dict(),
        }

    def on(self, model: nn.Module) -> AbstractContextManager[Any]:
        return attach(model, self.memory, self.config)
