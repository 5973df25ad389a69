"""Small whole numbers, packed in 4 or 8 bits each. Pure torch.

A row of n four-bit numbers takes n/2 bytes: byte i holds number i in its low half and number
i + n/2 in its high half, so that a kernel reads the two halves of a row as two contiguous runs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack whole numbers of -8..7 or -128..127.

    Shapes: numbers [M, n] → uint8 [M, n/2] or int8 [M, n].
    """
    if bits == 8:
        return numbers.to(torch.int8)
    low, high = (numbers.to(torch.int16) + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def unpack(packed: Tensor) -> Tensor:
    """Return packed numbers as int8. Shapes: uint8 [..., n/2] or int8 [..., n] → [..., n]."""
    if packed.dtype == torch.int8:
        return packed
    halves = torch.cat([packed & 15, packed >> 4], dim=-1)
    return halves.to(torch.int8) - 8
