"""Memories that should not help, to hold against one that does.

Knows memories; nothing of models or of how a result is measured.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from knn_moe.memory import RoutingMemory


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
