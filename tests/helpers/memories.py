"""Comparing memories."""

from __future__ import annotations

import torch

from knn_moe import RoutingMemory


def same_cases(one: RoutingMemory, other: RoutingMemory) -> bool:
    """Tell whether two memories have the same tokens, keys, values and γ, bit for bit."""
    columns = vars(one.provenance)
    return all(
        torch.equal(getattr(one.provenance, name), getattr(other.provenance, name))
        for name in columns
    ) and all(
        torch.equal(layer.keys, other.layers[index].keys)
        and torch.equal(layer.values, other.layers[index].values)
        and layer.gamma == other.layers[index].gamma
        for index, layer in one.full_layers().items()
    )
