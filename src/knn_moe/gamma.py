"""The kernel's width from a memory's own distances (§5.1: "set heuristically based on the average
nearest neighbor distance in the memory").

γ = 1 / mean d², where d is a key's distance to its nearest key of another example. Left out: the
key itself, keys of the same example, and keys that read the same tokens (templates share their
prefixes: zero distances that would drag the mean down). At that γ a neighbour at a typical
distance gives λ ≈ exp(-1).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from knn_moe.index.others import nearest_others

_SAMPLE: Final = 1024  # keys whose nearest neighbour is looked up: all, or this many evenly spaced
_CANDIDATES: Final = 4  # nearest keys looked at, so that exact repeats can be passed over


def estimate_gamma(
    keys: Tensor, example: Tensor, case: Tensor, device: torch.device | None = None
) -> float:
    """γ of one layer, computed on `device` block by block: the keys may be a mapped file.

    Where every key is of one example, keys of the same example count; where no two keys differ,
    γ is 1, any kernel being as good.
    Shapes: keys [M, d]; example, case [M] int64, `case` equal for keys that are one case.
    """
    if len(keys) < 2:
        return 1.0
    count = min(_SAMPLE, len(keys))
    rows = torch.arange(count) * len(keys) // count
    alone = bool((example == example[0]).all())
    owner = torch.arange(len(keys)) if alone else example
    labels = [(label[rows], label) for label in (owner, case)]
    near, _ = nearest_others(keys[rows], keys, labels, _CANDIDATES, device or keys.device)
    nearest = near.masked_fill(near == 0, float("inf")).amin(dim=-1)
    found = nearest[nearest.isfinite()].double()
    return float(1 / found.mean()) if len(found) else 1.0
