"""Values in 4 or 8 bits for each expert. Pure torch.

Each expert's mean over the memory is stored separately; the rest of a value is scaled by its own
largest entry. Averaging over neighbours averages the rounding errors too.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from knn_moe.index.fast.packing import pack, unpack

_LARGEST: Final = {4: 7, 8: 127}


class PackedValues(NamedTuple):
    """Shapes: codes [M, N/2] uint8 or [M, N] int8; steps [M] fp16; centre [N] fp32."""

    codes: Tensor
    steps: Tensor
    centre: Tensor

    @staticmethod
    def of(values: Tensor, bits: int) -> PackedValues:
        """Pack values. Shapes: values [M, N] fp32."""
        centre = values.mean(dim=0)
        rest = values - centre
        steps = rest.abs().amax(dim=-1) / _LARGEST[bits]
        steps = steps.clamp(max=torch.finfo(torch.float16).max).half()
        divisor = steps.float().masked_fill(steps == 0, 1)[:, None]
        numbers = (rest / divisor).round().clamp(-_LARGEST[bits], _LARGEST[bits])
        if bits == 4:
            numbers = F.pad(numbers, (0, numbers.shape[1] % 2))
        return PackedValues(pack(numbers, bits), steps, centre)

    def at(self, places: Tensor) -> Tensor:
        """Return the values at `places`. Shapes: places [...] → [..., N] fp32."""
        numbers = unpack(self.codes[places])[..., : len(self.centre)]
        return self.centre + numbers * self.steps[places].float()[..., None]

    def largest(self) -> Tensor:
        """Return a bound of the largest magnitude. Shape []."""
        return self.centre.abs().amax() + _LARGEST[8] * self.steps.float().amax()
