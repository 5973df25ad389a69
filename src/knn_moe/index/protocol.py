"""What the rest of the library asks of an index."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeyIndex(Protocol):
    """Finds the nearest keys by squared Euclidean distance."""

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest keys of each query, nearest first; k is at most the number of keys.

        Shapes: queries [T, d]. Result: squared distances [T, k] fp32, rows [T, k] int64.
        """
        ...
