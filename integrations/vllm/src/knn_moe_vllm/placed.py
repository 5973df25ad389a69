"""A memory on the routers of one process. Knows knn_moe's recall and positions of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from knn_moe.recall.layer import Recall
from torch import Tensor


@dataclass(frozen=True)
class Placed:
    """A memory on the routers of this process."""

    recalls: dict[int, Recall]  # by layer
    spares_first: bool  # leave the first token of each sequence to the router

    def mix(self, layer: int, x: Tensor, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the mixed logits. Shapes: x [T, d]; logits [T, N]; positions [T]."""
        mixed, _ = self.recalls[layer].forward(x, logits)
        if self.spares_first:
            mixed = torch.where((positions == 0)[:, None], logits, mixed)
        return mixed
