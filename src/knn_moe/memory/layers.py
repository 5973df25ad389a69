"""The cases of one layer: keys, values, and the kernel width γ that fits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerShape(NamedTuple):
    """What a layer's router maps, and the dtype of its keys. Values are fp32."""

    hidden_size: int
    num_experts: int
    dtype: torch.dtype


@dataclass(frozen=True)
class LayerMemory:
    """One layer's cases. Shapes: keys [M, d], the model's dtype; values [M, N], fp32."""

    keys: Tensor
    values: Tensor
    gamma: float  # of the RBF kernel, from these keys' own distances

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        cases, hidden = self.keys.shape
        experts = self.values.shape[1]
        return f"LayerMemory({cases:,} cases, {hidden} → {experts}, γ={self.gamma:.3g})"

    @property
    def shape(self) -> LayerShape:
        """The sizes of keys and values."""
        return LayerShape(self.keys.shape[1], self.values.shape[1], self.keys.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes
