"""Exact search in torch, on any device. Knows keys and distances; nothing of routing.

Candidates are found by a matrix product in the keys' own dtype, block by block, so that no score
matrix of queries × keys is held whole. The product form ‖x‖² + ‖k‖² - 2x·k cancels: queries are
centred, sums are kept in fp32, and the winners' distances are computed again as ‖x - k‖².
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

# Keys, and queries, compared at a time: fixed, so that a compiled graph serves every length.
_KEYS: Final = {"cuda": 1 << 15, "cpu": 1 << 12}
_QUERIES: Final = {"cuda": 1 << 11, "cpu": 1 << 10}
_GROUP: Final = 64  # columns of a score matrix that are looked at together
_SPARE: Final = 4  # candidates kept beyond k, for the exact distances to choose among


class ExactIndex(nn.Module):
    """Keys as they are, searched in full.

    An nn.Module so that torch.compile takes the keys for static tensors, not for inputs to copy.
    """

    keys: Tensor
    centre: Tensor
    norms: Tensor

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        centre, norms = centred_norms(keys)
        self.register_buffer("keys", keys, persistent=False)
        self.register_buffer("centre", centre, persistent=False)
        self.register_buffer("norms", norms, persistent=False)

    def tensors(self) -> dict[str, Tensor]:
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
        """Rows of each query's `count` best scores ‖k - c‖² - 2(x - c)·k. Result [T, count]."""
        # Doubled beforehand: a compiler may take norms - 2 x·k for one product, and lose the 2.
        minus_two = -2 * (queries.float() - self.centre)
        best: list[tuple[Tensor, Tensor]] = []
        for start, stop in blocks(len(self.keys), self.keys.device, least=count):
            scores = product(minus_two, self.keys[start:stop]) + self.norms[start:stop]
            score, row = least(scores, min(count, stop - start))
            best.append((score, row + start))
        rows = torch.cat([row for _, row in best], dim=-1)
        scores = torch.cat([score for score, _ in best], dim=-1)
        return rows.gather(1, torch.topk(scores, count, dim=-1, largest=False).indices)


def least(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` least of each row and their columns, ascending.

    The least `count` are among the `count` groups of columns whose own least is least: a minimum
    over groups and two small searches cost less than one long one.
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
    """‖x - k‖² without cancellation, in fp32. Shapes: x, keys [..., d], broadcast. Result [...]."""
    return (x.float() - keys.float()).square().sum(dim=-1)


def centred_norms(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The keys' mean c and ‖k - c‖² of each, in fp32. Shapes: keys [M, d] → [d], [M]."""
    spans = list(blocks(len(keys), keys.device))
    centre = keys.new_zeros(keys.shape[1], dtype=torch.float32)
    for start, stop in spans:
        centre += keys[start:stop].sum(dim=0, dtype=torch.float32) / len(keys)
    norms = [squared_distance(keys[start:stop], centre) for start, stop in spans]
    return centre, torch.cat(norms)


def product(x: Tensor, keys: Tensor) -> Tensor:
    """x kᵀ summed in fp32, multiplied in the keys' dtype where the hardware does that.

    Shapes: x [T, d]; keys [M, d]. Result [T, M] fp32.
    """
    if keys.is_cuda and keys.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x.to(keys.dtype), keys.T, out_dtype=torch.float32)
    return x.float() @ keys.float().T


def blocks(rows: int, device: torch.device, least: int = 1) -> Iterator[tuple[int, int]]:
    """Cut `rows` keys into spans that are compared at a time on `device`."""
    size = max(_KEYS.get(device.type, _KEYS["cpu"]), least)
    for start in range(0, rows, size):
        yield start, min(start + size, rows)
