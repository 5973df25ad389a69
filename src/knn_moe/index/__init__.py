"""Nearest-neighbour search: squared-L2 top-k over a layer's keys, behind one protocol."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from knn_moe.config import INDEXES, IndexConfig
from knn_moe.index.exact import ExactIndex
from knn_moe.index.fast.index import FastIndex
from knn_moe.index.protocol import KeyIndex

__all__ = [
    "INDEXES",
    "ExactIndex",
    "FastIndex",
    "IndexConfig",
    "KeyIndex",
    "build_index",
    "load_index",
]


def build_index(keys: Tensor, config: IndexConfig, device: torch.device) -> KeyIndex:
    """Build an index of keys on `device`.

    Args:
        keys: Keys, prepared for the similarity that the index will serve. Shape [M, d].
        config: The kind of index and its options.
        device: Where queries come from.

    Raises:
        MissingDependencyError: The kind needs FAISS, which is not installed.
    """
    if config.kind == "exact":
        return ExactIndex(keys.to(device))
    if config.kind == "fast":
        return FastIndex.build(keys.to(device), config)
    from knn_moe.index.faiss import FaissIndex

    return FaissIndex.build(keys, config, device)


def load_index(
    tensors: Mapping[str, Tensor], config: IndexConfig, device: torch.device
) -> KeyIndex:
    """Restore the index whose `tensors()` these are, on `device`.

    Raises:
        MissingDependencyError: The kind needs FAISS, which is not installed.
        MemoryFormatError: A FAISS index is damaged or incomplete.
    """
    if config.kind == "exact":
        return ExactIndex(tensors["keys"].to(device))
    if config.kind == "fast":
        kept = {name: part for name, part in tensors.items() if config.rerank or name != "keys"}
        moved = {name: part.to(device) for name, part in kept.items()}
        return FastIndex(moved, config)
    from knn_moe.index.faiss import FaissIndex

    return FaissIndex.load(tensors, config, device)
