"""Cases drawn at random for each token, by a hash: no state, nothing depends on what came before.

Knows numbers only. The same query and seed draw the same cases in whatever run they are met; a
query that differs in its last bit draws others. Static shapes, as recall.py. Pure torch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_WHOLE: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes
_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64
_LARGEST: Final = 2**63 - 1


def draw_cases(queries: Tensor, k: int, cases: int, seed: int) -> Tensor:
    """k of `cases` for each query, each as likely, independent of one another.

    Shapes: queries [T, d] → [T, k] int64.
    """
    bits = queries.contiguous().view(_WHOLE[queries.element_size()]).long()
    weights = _stirred(_numbers(bits.shape[1], queries.device, seed)) | 1
    code = _stirred((bits * weights).sum(dim=-1))
    ranks = _stirred(_numbers(k, queries.device, seed + 1))
    return (_stirred(code[:, None] ^ ranks) & _LARGEST) % cases


def _numbers(count: int, device: torch.device, seed: int) -> Tensor:
    """Far apart, another row of them for each seed. Shapes: [count] int64, modulo 2⁶⁴."""
    return (torch.arange(count, device=device) + (seed % 2**40 << 20) + 1) * _GOLDEN


def _stirred(numbers: Tensor) -> Tensor:
    """Every bit of the result depends on every bit given (splitmix64's finaliser), modulo 2⁶⁴."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, places: int) -> Tensor:
    """To the right, zeros coming in from the left."""
    shifted: Tensor = (numbers >> places) & (2 ** (64 - places) - 1)
    return shifted
