"""Nearest-neighbour search: squared-L2 top-k over a layer's keys, behind one protocol."""

from knn_moe.index.exact import ExactIndex
from knn_moe.index.protocol import KeyIndex

__all__ = ["ExactIndex", "KeyIndex"]
