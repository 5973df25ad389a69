"""Exact search among the keys a query may see: neighbours within a memory, without its own example.

It works block by block on any device: the keys may be a mapped file, of which no more than a block
is loaded at a time, and no score matrix is held whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from knn_moe.index.exact import (
    distances_to_rows,
    dot_products,
    row_blocks,
    smallest,
    squared_distance,
)

_QUERIES: Final = 4096  # compared at a time
_SPARE: Final = 4  # candidates kept beyond `count`, for the exact distances to choose among


def search_leaving_out(
    queries: Tensor,
    keys: Tensor,
    labels: Sequence[tuple[Tensor, Tensor]],
    count: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the nearest keys that share no label with a query, nearest first.

    Args:
        queries: Shape [T, d].
        keys: Shape [M, d].
        labels: Pairs of the queries' labels [T] and the keys' labels [M], int64. A query does not
            see the keys that have its label in any pair.
        count: How many keys to find.
        device: Where distances are computed.

    Returns:
        Squared distances [T, count] in fp32 on `device`, inf where fewer keys are left, and rows
        [T, count] int64 on the keys' device.
    """
    count = min(count, len(keys))
    found = [
        _search(queries[part], keys, [(own[part], other) for own, other in labels], count, device)
        for part in torch.arange(len(queries)).split(_QUERIES)
    ]
    return torch.cat([part for part, _ in found]), torch.cat([part for _, part in found])


def _search(
    queries: Tensor,
    keys: Tensor,
    labels: Sequence[tuple[Tensor, Tensor]],
    count: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    queries, candidates = queries.to(device), min(count + _SPARE, len(keys))
    centre = queries.float().mean(dim=0)
    minus_two = -2 * (queries.float() - centre)
    best = torch.full((len(queries), candidates), float("inf"), device=device)
    chosen = torch.zeros(len(queries), candidates, dtype=torch.int64, device=device)
    load = _BlockLoader(device)
    for start, stop in row_blocks(len(keys), device, at_least=candidates):
        block = load(keys[start:stop])
        # In place: the score matrix is the largest tensor, and passes over it cost most.
        score = split_dot_products(minus_two, block).add_(squared_distance(block, centre))
        for own, other in labels:
            same = own[:, None].to(device) == other[start:stop].to(device)
            score.masked_fill_(same, float("inf"))
        near, place = smallest(score, min(candidates, stop - start))
        # In place: small tensors kept between blocks would pin the memory that blocks free.
        kept, order = torch.topk(torch.cat([best, near], dim=-1), candidates, dim=-1, largest=False)
        chosen.copy_(torch.cat([chosen, place + start], dim=-1).gather(1, order))
        best.copy_(kept)
    rows = chosen.to(keys.device)
    distance = distances_to_rows(queries, keys, rows).masked_fill(~best.isfinite(), float("inf"))
    # Scores are rounded: exact distances decide, among a few more candidates than are wanted.
    nearest, order = torch.topk(distance, count, dim=-1, largest=False)
    return nearest, rows.gather(1, order.to(rows.device))


def split_dot_products(x: Tensor, keys: Tensor) -> Tensor:
    """Return x kᵀ as `dot_products` does, quickly for many x.

    On a GPU the bf16 units are fifteen times as fast as those for fp32, so fp32 keys are multiplied
    as sums of two bf16 numbers (16 bits); only the product of the two small parts is left out.

    Shapes: x [T, d]; keys [M, d]. Result [T, M] fp32.
    """
    if not keys.is_cuda or keys.dtype != torch.float32:
        return dot_products(x, keys)
    return dot_products(*split_factors(x, keys))


def split_factors(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return bf16 tensors whose product is almost x kᵀ. Shapes: [·, d] → [·, 3d]."""
    (large, small), (large_keys, small_keys) = _split(x), _split(keys)
    return (
        torch.cat([large, large, small], dim=-1),
        torch.cat([large_keys, small_keys, large_keys], dim=-1),
    )


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    large = x.bfloat16()
    return large, (x - large.float()).bfloat16()


class _BlockLoader:
    """Copies blocks of a mapped file to a device; through pinned memory, which GPUs read fast."""

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
