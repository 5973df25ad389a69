"""What the rest of the library asks of an index."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeyIndex(Protocol):
    """Finds the nearest keys by squared Euclidean distance.

    An index may keep keys in an order of its own: it speaks of places in that order, and `rows`
    [M], where it has one, says which key is at a place.
    """

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest keys of each query, nearest first; k is at most the number of keys.

        An approximate index may find fewer: the rest have distance inf and place 0.
        Shapes: queries [T, d]. Result: squared distances [T, k] fp32, places [T, k] int64.
        """
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What the index consists of, enough to make it again without the keys."""
        ...
