"""The tensors of distilled layers as their kernels read them: one layer's, or several stacked.

Knows tensors and shapes; nothing of Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

_ALIGNED: Final = 8  # prototypes: each memory's part of a stack begins at an aligned address


class PrototypeTensors(NamedTuple):
    """The prototypes of S memories for one router, S = 1 for one memory.

    Shapes: factors [S, N + P, d], W and below it the prototypes around their centre; centre [S, d];
    offsets [S, P], see DistilledRecall; updates [S, P, N]; sizes [S] int32, how many prototypes
    each has, P at the most; widths [S, 4], γ, log s_0, λ's factor and a 0. All but the factors and
    the sizes are fp32.
    """

    factors: Tensor
    centre: Tensor
    offsets: Tensor
    updates: Tensor
    sizes: Tensor
    widths: Tensor

    @property
    def experts(self) -> int:
        """N."""
        return self.updates.shape[2]

    @property
    def prototypes(self) -> int:
        """P."""
        return self.offsets.shape[1]

    def of_memory(self, slot: int) -> PrototypeTensors:
        """Return one memory's tensors, which share their data with these, but for its size."""
        size, one = int(self.sizes[slot]), slice(slot, slot + 1)
        return PrototypeTensors(
            factors=self.factors[one, : self.experts + size],
            centre=self.centre[one],
            offsets=self.offsets[one, :size],
            updates=self.updates[one, :size],
            sizes=self.sizes[one].clone(),
            widths=self.widths[one],
        )


def stack_prototypes(memories: Sequence[PrototypeTensors]) -> PrototypeTensors:
    """Return the tensors of several memories in one, padded to the most prototypes.

    The memories have the same d, N and dtype, and lie on the same device.
    """
    most = max(each.prototypes for each in memories)
    most += -most % _ALIGNED
    return PrototypeTensors(
        factors=torch.cat([_pad(each.factors, most - each.prototypes) for each in memories]),
        centre=torch.cat([each.centre for each in memories]),
        offsets=torch.cat([_pad(each.offsets, most - each.prototypes) for each in memories]),
        updates=torch.cat([_pad(each.updates, most - each.prototypes) for each in memories]),
        sizes=torch.cat([each.sizes for each in memories]),
        widths=torch.cat([each.widths for each in memories]),
    )


def _pad(tensor: Tensor, rows: int) -> Tensor:
    """Add rows of zeros. Shapes: [1, R, ...] → [1, R + rows, ...]."""
    zeros = tensor.new_zeros(1, rows, *tensor.shape[2:])
    return torch.cat([tensor, zeros], dim=1)
