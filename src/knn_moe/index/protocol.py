"""The protocol that every index follows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeyIndex(Protocol):
    """Finds the nearest keys by squared Euclidean distance.

    An index may store keys in an order of its own. It then returns places in that order, and has
    an attribute `rows` [M]: the row of the key at each place.
    """

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k nearest keys of each query, nearest first; k is at most the number of keys.

        An approximate index may find fewer: the rest have distance inf and place 0.
        Shapes: queries [T, d]. Result: squared distances [T, k] fp32, places [T, k] int64.
        """
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors from which `load_index` restores the index without the keys."""
        ...
