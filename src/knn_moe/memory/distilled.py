"""A layer whose cases were distilled to a few prototypes, with updates that were learned.

Knows names and tensors. `adapt/distil/` makes such layers, `recall/distilled.py` uses them, and
equations/prototypes.py says what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from knn_moe.memory.layers import LayerShape


@dataclass(frozen=True)
class DistilledLayer:
    """One layer's prototypes.

    Shapes: keys [P, d] and linear [N, d], the model's dtype; updates [P, N] fp32, which are added
    to the router's logits; cases [P] int64, the memory's case nearest to each prototype.
    """

    keys: Tensor
    updates: Tensor
    linear: Tensor
    cases: Tensor
    gamma: float  # of the RBF kernel
    log_threshold: float  # log s_0

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        prototypes, hidden = self.keys.shape
        experts = self.updates.shape[1]
        return (
            f"DistilledLayer({prototypes:,} prototypes, {hidden} → {experts}, γ={self.gamma:.3g})"
        )

    @property
    def shape(self) -> LayerShape:
        """The sizes of keys and updates."""
        return LayerShape(self.keys.shape[1], self.updates.shape[1], self.keys.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        names = ("keys", "updates", "linear", "cases")
        return {name: getattr(self, name) for name in names}

    def entry(self) -> dict[str, Any]:
        """Return what memory_config.json says of the layer, beside its file."""
        return {
            "gamma": self.gamma,
            "log_threshold": self.log_threshold,
            "prototypes": len(self),
        }

    @staticmethod
    def read(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DistilledLayer:
        """Return the layer that `entry()` and its tensors describe."""
        return DistilledLayer(**tensors, gamma=entry["gamma"], log_threshold=entry["log_threshold"])
