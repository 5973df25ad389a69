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
    nearest = _nearest_distances(keys, rows, (owner, case), device or keys.device)
    found = nearest[nearest.isfinite()].double()
    return float(1 / found.mean()) if len(found) else 1.0


def _nearest_distances(
    keys: Tensor, rows: Tensor, barred_if_equal: tuple[Tensor, ...], device: torch.device
) -> Tensor:
    """Each row's squared distance to its nearest admissible key, inf where there is none."""
    queries = keys[rows].to(device)
    centre = queries.float().mean(dim=0)
    count = min(_CANDIDATES, len(keys))
    best = torch.full((len(rows), count), float("inf"), device=device)
    chosen = torch.zeros(len(rows), count, dtype=torch.int64, device=device)
    staged = _Stage(device)
    for start, stop in blocks(len(keys), device, least=count):
        block = staged(keys[start:stop])
        score = squared_distance(block, centre) - 2 * product(queries.float() - centre, block)
        for label in barred_if_equal:
            same = label[rows, None].to(device) == label[start:stop].to(device)
            score.masked_fill_(same, float("inf"))
        near, place = torch.topk(score, min(count, stop - start), dim=-1, largest=False)
        # In place: small tensors kept between blocks would pin the memory the blocks free.
        kept, order = torch.topk(torch.cat([best, near], dim=-1), count, dim=-1, largest=False)
        chosen.copy_(torch.cat([chosen, place + start], dim=-1).gather(1, order))
        best.copy_(kept)
    chosen = chosen.to(keys.device)
    distance = squared_distance(queries[:, None], keys[chosen].to(device))
    admissible = best.isfinite() & (distance > 0)
    return distance.masked_fill(~admissible, float("inf")).amin(dim=-1)


class _Stage:
    """Brings blocks of a mapped file to a device; through pinned memory, which GPUs read fast."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer: Tensor | None = None

    def __call__(self, block: Tensor) -> Tensor:
        if self.device.type != "cuda" or block.is_cuda:
            return block.to(self.device)
        if self.buffer is None:
            self.buffer = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
        pinned = self.buffer[: len(block)]
        pinned.copy_(block)
        return pinned.to(self.device)
