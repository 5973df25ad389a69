"""Which experts a model chooses how often, with a memory attached or without.

Watches the routers' own outputs: what is counted is what was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from knn_moe.intercept import chosen_experts
from knn_moe.routers import Router, find_routers


class ExpertCounts:
    """How often each expert was chosen, by router; and for how many tokens."""

    def __init__(self, routers: list[Router]) -> None:
        self.counts = {
            router.layer: torch.zeros(router.num_experts, dtype=torch.int64) for router in routers
        }
        self.tokens = dict.fromkeys(self.counts, 0)

    def add(self, router: Router, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the router."""
        parts = output if isinstance(output, tuple) else (output,)
        logits = next(part for part in parts if part.shape[-1] == router.num_experts)
        chosen = chosen_experts(router, output, logits.flatten(0, -2)).cpu()
        self.counts[router.layer] += torch.bincount(chosen.flatten(), minlength=router.num_experts)
        self.tokens[router.layer] += len(chosen)

    def shares(self) -> Tensor:
        """The share of tokens each expert was chosen for. Shape [layers, experts]."""
        return torch.stack(
            [count / max(self.tokens[layer], 1) for layer, count in self.counts.items()]
        )


@contextmanager
def count_experts(model: nn.Module) -> Iterator[ExpertCounts]:
    """While inside, count what the routers of `model` choose."""
    routers = find_routers(model)
    counts = ExpertCounts(routers)
    handles = [
        router.module.register_forward_hook(partial(counts.add, router)) for router in routers
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
