"""Exact search in torch, on any device, and the arithmetic that the other indexes share.

Candidates are found by a matrix product in the keys' own dtype, block by block, so that no score
matrix of queries × keys is held whole. The product form ‖x‖² + ‖k‖² - 2x·k cancels: queries are
centred, sums are kept in fp32, and the distances of the nearest are computed again as ‖x - k‖².
Knows keys and distances; nothing of routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

# Keys, and queries, compared at a time: fixed, so that a compiled graph serves every length.
_KEYS: Final = {"cuda": 1 << 15, "cpu": 1 << 12}
_QUERIES: Final = {"cuda": 1 << 11, "cpu": 1 << 10}
_GROUP: Final = 64  # columns of a score matrix that are compared together
_SPARE: Final = 4  # candidates kept beyond k, for the exact distances to choose among
_GATHERED: Final = 1 << 26  # numbers of keys that are gathered at a time


class ExactIndex(nn.Module):
    """All keys, searched in full.

    A module, so that torch.compile treats the keys as static tensors, not as inputs to copy.
    """

    keys: Tensor
    centre: Tensor
    norms: Tensor

    def __init__(self, keys: Tensor) -> None:
        """Shapes: keys [M, d]."""
        super().__init__()
        centre, norms = centred_norms(keys)
        self.register_buffer("keys", keys, persistent=False)
        self.register_buffer("centre", centre, persistent=False)
        self.register_buffer("norms", norms, persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        """See KeyIndex."""
        return {"keys": self.keys}

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See KeyIndex. Shapes: queries [T, d] → squared distances, rows [T, k]."""
        at_once = _QUERIES.get(queries.device.type, _QUERIES["cpu"])
        if len(queries) <= at_once:
            return self._search(queries, k)
        found = [self._search(part, k) for part in queries.split(at_once)]
        return torch.cat([part for part, _ in found]), torch.cat([part for _, part in found])

    def _search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        candidates = self._candidates(queries, min(k + _SPARE, len(self.keys)))
        exact = squared_distance(queries[:, None], self.keys[candidates])
        distance, order = torch.topk(exact, k, dim=-1, largest=False)
        return distance, candidates.gather(1, order)

    def _candidates(self, queries: Tensor, count: int) -> Tensor:
        """Return the rows with the lowest scores ‖k - c‖² - 2(x - c)·k. Result [T, count]."""
        # Doubled beforehand: a compiler may take norms - 2 x·k for one product, and lose the 2.
        minus_two = -2 * (queries.float() - self.centre)
        best: list[tuple[Tensor, Tensor]] = []
        for start, stop in row_blocks(len(self.keys), self.keys.device, at_least=count):
            scores = dot_products(minus_two, self.keys[start:stop]) + self.norms[start:stop]
            score, row = smallest(scores, min(count, stop - start))
            best.append((score, row + start))
        rows = torch.cat([row for _, row in best], dim=-1)
        scores = torch.cat([score for score, _ in best], dim=-1)
        return rows.gather(1, torch.topk(scores, count, dim=-1, largest=False).indices)


def smallest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` smallest of each row and their columns, ascending.

    They are among the `count` groups of columns with the smallest minima: a minimum over groups
    and two short searches cost less than one long search.
    Shapes: scores [T, n] → [T, count] twice.
    """
    groups = scores.shape[1] // _GROUP
    if groups <= 2 * count or scores.shape[1] % _GROUP:
        return torch.topk(scores, count, dim=-1, largest=False)
    grouped = scores.view(-1, groups, _GROUP)
    group = torch.topk(grouped.amin(dim=-1), count, dim=-1, largest=False).indices
    near = grouped.gather(1, group[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    score, place = torch.topk(near, count, dim=-1, largest=False)
    return score, group.gather(1, place // _GROUP) * _GROUP + place % _GROUP


def squared_distance(x: Tensor, keys: Tensor) -> Tensor:
    """Return ‖x - k‖² without cancellation, in fp32.

    Shapes: x, keys [..., d], broadcast. Result [...].
    """
    return (x.float() - keys.float()).square().sum(dim=-1)


def distances_to_rows(
    queries: Tensor, keys: Tensor, rows: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Return ‖s(x - k)‖² from each query to the keys of its rows, some queries at a time.

    Args:
        queries: Shape [T, d].
        keys: May be a mapped file, of which only these rows are read. Shape [M, d].
        rows: On the keys' device. Shape [T, c].
        scale: s; where it is small, distances past fp32 still have an order. None: 1.

    Returns:
        Shape [T, c], in fp32 on the queries' device.
    """
    at_once = max(1, _GATHERED // (rows.shape[1] * keys.shape[1]))
    pairs = zip(queries.split(at_once), rows.split(at_once), strict=True)
    differences = (x[:, None].float() - keys[near].to(x.device).float() for x, near in pairs)
    if scale is not None:
        differences = (part * scale for part in differences)
    return torch.cat([part.square().sum(dim=-1) for part in differences])


def centred_norms(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys' mean c and ‖k - c‖² of each, in fp32. Shapes: keys [M, d] → [d], [M]."""
    blocks = list(row_blocks(len(keys), keys.device))
    centre = keys.new_zeros(keys.shape[1], dtype=torch.float32)
    for start, stop in blocks:
        centre += keys[start:stop].sum(dim=0, dtype=torch.float32) / len(keys)
    norms = [squared_distance(keys[start:stop], centre) for start, stop in blocks]
    return centre, torch.cat(norms)


def dot_products(x: Tensor, keys: Tensor) -> Tensor:
    """Return x kᵀ summed in fp32, multiplied in the keys' dtype where the hardware does that.

    Shapes: x [T, d]; keys [M, d]. Result [T, M] fp32.
    """
    if keys.is_cuda and keys.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x.to(keys.dtype), keys.T, out_dtype=torch.float32)
    return x.float() @ keys.float().T


def row_blocks(rows: int, device: torch.device, at_least: int = 1) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the blocks of keys that are compared at a time on `device`."""
    size = max(_KEYS.get(device.type, _KEYS["cpu"]), at_least)
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


def spread_evenly(count: int, total: int, device: torch.device | None = None) -> Tensor:
    """Return `count` of `total` rows, evenly spaced, or all if there are fewer. Shape [n] int64."""
    count = min(count, total)
    return torch.arange(count, device=device) * total // count
