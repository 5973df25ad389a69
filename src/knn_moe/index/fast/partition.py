"""A coarse partition of a layer's keys into lists of neighbours, of at most LONGEST keys each.

k-means on a sample; then every list that is too long is cut along its widest direction.
Knows points and lists; nothing of codes or of routing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.index.exact import spread_evenly

LONGEST: Final = 512  # points of a list: a kernel's tile
_TYPICAL: Final = 384  # points per k-means cell
_SAMPLE: Final = 128  # points per cell that k-means sees
_ROUNDS: Final = 8
_BLOCK: Final = 1 << 14  # points compared with all centres at a time


class Partition(NamedTuple):
    """Points `order[begin[l] : begin[l + 1]]` make list l. Shapes: order [M]; begin [L + 1]."""

    order: Tensor
    begin: Tensor


def partition(points: Tensor) -> Partition:
    """Group points into lists of at most LONGEST. Shapes: points [M, r] fp32."""
    cell = nearest_centre(points, k_means(points, max(len(points) // _TYPICAL, 1)))
    cell = _cut(points, cell)
    order = torch.argsort(cell, stable=True)
    sizes = torch.bincount(cell)
    begin = torch.zeros(len(sizes) + 1, dtype=torch.int64, device=points.device)
    torch.cumsum(sizes, dim=0, out=begin[1:])
    return Partition(order, begin)


def list_means(points: Tensor, begin: Tensor) -> Tensor:
    """Return the mean of each list.

    Shapes: points [M, r], in the partition's order; begin [L + 1] → [L, r].
    """
    sizes = begin.diff()
    of = torch.repeat_interleave(torch.arange(len(sizes), device=points.device), sizes)
    return _sums(points, of, len(sizes)) / sizes[:, None]


def nearest_centre(points: Tensor, centres: Tensor) -> Tensor:
    """Return the number of each point's nearest centre.

    Shapes: points [M, r]; centres [L, r] → [M] int64.
    """
    norms = centres.square().sum(dim=-1)
    parts = [(norms - 2 * part @ centres.T).argmin(dim=-1) for part in points.split(_BLOCK)]
    return torch.cat(parts)


def k_means(points: Tensor, cells: int) -> Tensor:
    """Run Lloyd's algorithm on an even sample; an empty cell keeps its centre."""
    sample = points[spread_evenly(cells * _SAMPLE, len(points), points.device)]
    centres = sample[spread_evenly(cells, len(sample), points.device)].clone()
    for _ in range(_ROUNDS):
        cell = nearest_centre(sample, centres)
        sizes = torch.bincount(cell, minlength=cells)[:, None]
        centres = torch.where(sizes > 0, _sums(sample, cell, cells) / sizes.clamp(min=1), centres)
    return centres


def _cut(points: Tensor, cell: Tensor) -> Tensor:
    """Renumber the lists, without empty ones, with each long one cut into equal parts."""
    _, cell, sizes = torch.unique(cell, return_inverse=True, return_counts=True)
    mean = _sums(points, cell, len(sizes)) / sizes[:, None]
    spread = _sums(points.square(), cell, len(sizes)) / sizes[:, None] - mean.square()
    along = points.gather(1, spread.argmax(dim=-1)[cell, None]).squeeze(1)
    by_place = torch.argsort(along, stable=True)
    order = by_place[torch.argsort(cell[by_place], stable=True)]
    begin = sizes.cumsum(0) - sizes
    rank = torch.empty_like(cell)
    rank[order] = torch.arange(len(cell), device=cell.device) - begin[cell[order]]
    parts = (sizes + LONGEST - 1) // LONGEST
    first = parts.cumsum(0) - parts
    numbers: Tensor = first[cell] + rank * parts[cell] // sizes[cell]
    return numbers


def _sums(points: Tensor, cell: Tensor, cells: int) -> Tensor:
    total = points.new_zeros(cells, points.shape[1])
    return total.index_add_(0, cell, points)
