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

from knn_moe.index.exact import blocks, product, squared_distance

_SAMPLE: Final = 1024  # keys whose nearest neighbour is looked up: all, or this many evenly spaced
_ZERO: Final = 1e-6  # squared distances below this share of the norms are rounding, not distance


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
    nearest = _nearest_distances(keys, rows, (owner, case), device or keys.device)
    found = nearest[nearest.isfinite()].double()
    return float(1 / found.mean()) if len(found) else 1.0


def _nearest_distances(
    keys: Tensor, rows: Tensor, barred_if_equal: tuple[Tensor, ...], device: torch.device
) -> Tensor:
    """Each row's squared distance to its nearest admissible key, inf where there is none."""
    queries = keys[rows].to(device)
    centre = queries.float().mean(dim=0)
    centred = queries.float() - centre
    query_norm = centred.square().sum(dim=-1, keepdim=True)
    shift = 2 * (centred @ centre)[:, None]  # (x - c)·(k - c) = (x - c)·k - (x - c)·c
    best = torch.full((len(rows),), float("inf"), device=device)
    nearest = torch.zeros(len(rows), dtype=torch.int64, device=device)
    for start, stop in blocks(len(keys), max(len(rows), keys.shape[1]), device):
        block = keys[start:stop].to(device)
        norm = squared_distance(block, centre)
        distance = query_norm + norm + shift - 2 * product(centred, block)
        barred = distance <= _ZERO * (query_norm + norm)
        for label in barred_if_equal:
            barred |= label[rows, None].to(device) == label[start:stop].to(device)
        distance, place = distance.masked_fill_(barred, float("inf")).min(dim=-1)
        nearest = torch.where(distance < best, place + start, nearest)
        best = torch.minimum(distance, best)
    exact = squared_distance(queries, keys[nearest.to(keys.device)].to(device))
    return torch.where(best.isfinite(), exact, best)
