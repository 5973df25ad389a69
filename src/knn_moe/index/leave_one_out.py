"""Nearest keys among those a query may see: neighbours within a memory, its own example left out.

Exact, block by block on any device: the keys may be a mapped file, of which no more than a block is
brought there, and no score matrix is held whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from knn_moe.index.exact import blocks, least, product, squared_distance

_QUERIES: Final = 4096  # compared at a time
_SPARE: Final = 4  # candidates kept beyond those asked for
_NUMBERS: Final = 1 << 26  # of keys gathered at a time


def nearest_others(
    queries: Tensor,
    keys: Tensor,
    labels: Sequence[tuple[Tensor, Tensor]],
    count: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Squared distances and rows of the `count` nearest keys that share no label with a query,
    nearest first; inf where there are fewer.

    Shapes: queries [T, d]; keys [M, d]; labels pairs of [T] and [M] int64 → [T, count] fp32 on
    `device`, [T, count] int64 where the keys are.
    """
    count = min(count, len(keys))
    found = [
        _nearest(queries[part], keys, [(asks[part], has) for asks, has in labels], count, device)
        for part in torch.arange(len(queries)).split(_QUERIES)
    ]
    return torch.cat([part for part, _ in found]), torch.cat([part for _, part in found])


def _nearest(
    queries: Tensor,
    keys: Tensor,
    labels: Sequence[tuple[Tensor, Tensor]],
    count: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    queries, found = queries.to(device), min(count + _SPARE, len(keys))
    centre = queries.float().mean(dim=0)
    minus_two = -2 * (queries.float() - centre)
    best = torch.full((len(queries), found), float("inf"), device=device)
    chosen = torch.zeros(len(queries), found, dtype=torch.int64, device=device)
    staged = _Stage(device)
    for start, stop in blocks(len(keys), device, least=found):
        block = staged(keys[start:stop])
        # In place: a score matrix is what there is most of, and passes over it cost most.
        score = many_products(minus_two, block).add_(squared_distance(block, centre))
        for asks, has in labels:
            same = asks[:, None].to(device) == has[start:stop].to(device)
            score.masked_fill_(same, float("inf"))
        near, place = least(score, min(found, stop - start))
        # In place: small tensors kept between blocks would pin the memory the blocks free.
        kept, order = torch.topk(torch.cat([best, near], dim=-1), found, dim=-1, largest=False)
        chosen.copy_(torch.cat([chosen, place + start], dim=-1).gather(1, order))
        best.copy_(kept)
    rows = chosen.to(keys.device)
    distance = _true_distances(queries, keys, rows)
    distance = distance.masked_fill(~best.isfinite(), float("inf"))
    # Scores round: true distances decide, among a few more than are asked for.
    nearest, order = torch.topk(distance, min(count, distance.shape[1]), dim=-1, largest=False)
    return nearest, rows.gather(1, order.to(rows.device))


def _true_distances(queries: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Of queries to the keys of their rows, some at a time. Shapes: rows [T, k] → [T, k] fp32."""
    at_once = max(1, _NUMBERS // (rows.shape[1] * keys.shape[1]))
    parts = zip(queries.split(at_once), rows.split(at_once), strict=True)
    near = [squared_distance(part[:, None], keys[place].to(part.device)) for part, place in parts]
    return torch.cat(near) if near else queries.new_empty(rows.shape, dtype=torch.float32)


def many_products(x: Tensor, keys: Tensor) -> Tensor:
    """x kᵀ as `exact.product`, for so many x that arithmetic is what takes the time. On a GPU the
    bf16 units are fifteen times as fast as fp32's, so fp32 keys are multiplied as sums of two bf16
    numbers, 16 bits of them; what is left out is the product of the two small parts.

    Shapes: x [T, d]; keys [M, d]. Result [T, M] fp32.
    """
    if not keys.is_cuda or keys.dtype != torch.float32:
        return product(x, keys)
    return product(*in_halves(x, keys))


def in_halves(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 tensors whose product is almost that of x and keys. Shapes: [·, d] → [·, 3d]."""
    (large, small), (large_keys, small_keys) = _halves(x), _halves(keys)
    return (
        torch.cat([large, large, small], dim=-1),
        torch.cat([large_keys, small_keys, large_keys], dim=-1),
    )


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    large = x.bfloat16()
    return large, (x - large.float()).bfloat16()


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
