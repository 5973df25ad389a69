"""A layer whose keys became an index: what is kept of them, and how good it is.

Knows names and tensors. `adapt/compress.py` makes such layers, `recall/layer.py` uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from knn_moe.config import IndexConfig
from knn_moe.memory.layers import LayerShape


@dataclass(frozen=True)
class IndexQuality:
    """How well an index finds a sample of its own keys, each without itself."""

    recall: float  # share whose nearest is the exact search's nearest
    confidence_error: float  # mean |λ - λ of the exact search|


@dataclass(frozen=True)
class CompressedLayer:
    """One layer's cases, without their keys.

    `tensors` are the index's, as "index.NAME", and the values', as "values.NAME".
    """

    tensors: Mapping[str, Tensor]
    gamma: float
    cases: int
    shape: LayerShape
    index: IndexConfig
    similarity: str  # the keys were prepared for this one
    quality: IndexQuality

    def __len__(self) -> int:
        return self.cases

    def __repr__(self) -> str:
        return (
            f"CompressedLayer({self.cases:,} cases as {self.index.kind}, "
            f"{self.bytes_per_case:.0f} bytes each, recall {self.quality.recall:.3f})"
        )

    def part(self, of: str) -> dict[str, Tensor]:
        """Return the tensors of the "index" or of the "values"."""
        start = f"{of}."
        found = {name: tensor for name, tensor in self.tensors.items() if name.startswith(start)}
        return {name.removeprefix(start): tensor for name, tensor in found.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of index and values."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def bytes_per_case(self) -> float:
        """The mean size of a case."""
        return self.nbytes / self.cases

    def entry(self) -> dict[str, Any]:
        """Return what memory_config.json says of the layer, beside its file."""
        hidden, experts, dtype = self.shape
        return {
            "gamma": self.gamma,
            "cases": self.cases,
            "shape": [hidden, experts, str(dtype).removeprefix("torch.")],
            "index": self.index.to_dict(),
            "similarity": self.similarity,
            "quality": asdict(self.quality),
        }

    @staticmethod
    def read(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CompressedLayer:
        """Return the layer that `entry()` and its tensors describe."""
        hidden, experts, dtype = entry["shape"]
        return CompressedLayer(
            tensors=tensors,
            gamma=entry["gamma"],
            cases=entry["cases"],
            shape=LayerShape(hidden, experts, getattr(torch, dtype)),
            index=IndexConfig(**entry["index"]),
            similarity=entry["similarity"],
            quality=IndexQuality(**entry["quality"]),
        )
