"""Draw cases at random for each token, by a hash: no state, nothing depends on earlier calls.

Knows numbers only. The same query and seed draw the same cases in every run; a query that differs
in its last bit draws others. Static shapes, as in layer.py. Pure torch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_WHOLE: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes
_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64
_LARGEST: Final = 2**63 - 1


def draw_cases(queries: Tensor, k: int, cases: int, seed: int) -> Tensor:
    """Draw k of `cases` for each query, with equal probability, independently of one another.

    Shapes: queries [T, d] → [T, k] int64.
    """
    bits = queries.contiguous().view(_WHOLE[queries.element_size()]).long()
    weights = _mix_bits(_numbers(bits.shape[1], queries.device, seed)) | 1
    code = _mix_bits((bits * weights).sum(dim=-1))
    ranks = _mix_bits(_numbers(k, queries.device, seed + 1))
    return (_mix_bits(code[:, None] ^ ranks) & _LARGEST) % cases


def _numbers(count: int, device: torch.device, seed: int) -> Tensor:
    """Return numbers that are far apart, others for each seed. Shape [count] int64, modulo 2⁶⁴."""
    return (torch.arange(count, device=device) + (seed % 2**40 << 20) + 1) * _GOLDEN


def _mix_bits(numbers: Tensor) -> Tensor:
    """Mix bits (splitmix64's finaliser): every bit of the result depends on all given."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        numbers = (numbers ^ _shift_right(numbers, shift)) * factor
    return numbers ^ _shift_right(numbers, 31)


def _shift_right(numbers: Tensor, places: int) -> Tensor:
    """Shift to the right; zeros come in from the left."""
    shifted: Tensor = (numbers >> places) & (2 ** (64 - places) - 1)
    return shifted
