"""The search of `fast`, in plain torch: nearest lists, then nearest keys in them.

Everything is a whole number, so every way of computing it gives the same result: these, and the
kernels (kernels.py) that are tested against them. Shapes: T queries, L lists, M keys, r dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knn_moe.index.fast.grid import FARTHEST, from_codes
from knn_moe.index.fast.packing import unpack
from knn_moe.index.fast.partition import LONGEST

PLACE_BITS: Final = 32  # a result is estimate · 2³² + place
NOT_FOUND: Final = torch.iinfo(torch.int64).max
NOWHERE: Final = torch.iinfo(torch.int32).max  # not found, within a list
BINS: Final = 128  # of the keys of a list BINS places apart, only the nearest is kept
_FEW: Final = 8  # queries that are looked up one by one


class Lists(NamedTuple):
    """Keys in lists. Shapes: codes [M, r/2] uint8 or [M, r] int8; norms [M] int32, ‖k‖² with a
    share of ‖k⊥‖²; centres [L, r], whole; centre_norms [L] fp32, their ‖c‖²; begin [L + 1] int32,
    the lists' first places."""

    codes: Tensor
    norms: Tensor
    centres: Tensor
    centre_norms: Tensor
    begin: Tensor


def scan(lists: Lists, whole: Tensor, probes: int, k: int) -> Tensor:
    """The k least estimate · 2³² + place among the keys of the nearest lists, ascending.

    estimate = min(‖q - k‖² + w ‖k⊥‖², FARTHEST). A key's place breaks ties. Of the keys of a list
    that are BINS places apart only the nearest counts: choosing k of a quarter of the keys is
    cheaper, and seldom loses one. Where fewer are left than k, the rest is NOT_FOUND.
    Shapes: whole [T, r] fp32 → [T, k] int64.
    """
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.knn_moe.scan(*lists, whole, probes, k)
        return found
    probed = nearest_lists(lists, whole, probes)
    if len(whole) <= _FEW:
        return _scan_each(lists, whole, probed, k)
    return _scan_grouped(lists, whole, probed, k)


def nearest_lists(lists: Lists, whole: Tensor, probes: int) -> Tensor:
    """Lists by ‖c‖² - 2q·c, nearest first, the lower number first among equals. [T, probes]."""
    coarse = torch.add(lists.centre_norms, whole @ lists.centres.float().T, alpha=-2)
    numbers = torch.arange(len(lists.centres), device=whole.device)
    ranked = (coarse.long() << PLACE_BITS) + numbers
    nearest = torch.topk(ranked, probes, dim=-1, largest=False).values
    numbers_only: Tensor = nearest & (2**PLACE_BITS - 1)
    return numbers_only


def _scan_each(lists: Lists, whole: Tensor, probed: Tensor, k: int) -> Tensor:
    """One query after the other, its lists side by side."""
    queries, square = _factors(lists, whole)
    results = [probed.new_empty(0, k)]
    probed = probed.sort(dim=-1).values
    spans = torch.stack([lists.begin[probed], lists.begin[probed + 1]], dim=-1).tolist()
    for at, ends in enumerate(spans):
        # Small arrays: numpy is done before torch has begun.
        side_by_side = np.concatenate([np.arange(*span) for span in ends])
        places = torch.from_numpy(side_by_side).to(whole.device)
        codes, norms = (part.index_select(0, places) for part in (lists.codes, lists.norms))
        scores = _scores(queries[at : at + 1], codes.T, norms)
        estimates = scores.add_(square[at]).clamp_(0, FARTHEST)
        if k == 1 and len(places):
            estimate, first = estimates.min(dim=-1, keepdim=True)
            results.append((estimate.long() << PLACE_BITS) + places[first])
            continue
        parts = estimates.split([end - start for start, end in ends], dim=1)
        found = [
            _widen(_best(part, k), start) for part, (start, _) in zip(parts, ends, strict=True)
        ]
        results.append(_least(torch.cat(found, dim=1), k))
    return torch.cat(results)


def _scan_grouped(lists: Lists, whole: Tensor, probed: Tensor, k: int) -> Tensor:
    """One list after the other, for all queries that probe it.

    Of each list its bins' least, or for one neighbour its least alone.
    """
    probed_lists, pairs = torch.sort(probed.flatten(), stable=True)
    queries, square = (part[pairs // probed.shape[1]] for part in _factors(lists, whole))
    numbers, counts = torch.unique_consecutive(probed_lists, return_counts=True)
    groups = _Groups(lists, numbers.tolist(), queries.split(counts.tolist()))
    first = lists.begin[probed_lists][:, None].long()
    found = _firsts(groups, square, first) if k == 1 else None
    if found is None:
        squares = square.split(counts.tolist())
        estimates = [
            scores.add_(part).clamp_(0, FARTHEST)
            for scores, part in zip(groups.scores(), squares, strict=True)
        ]
        found = _widen(torch.cat([_best(part, k) for part in estimates]), first)
    ordered = torch.empty_like(found)
    ordered[pairs] = found
    return _least(ordered.view(len(whole), -1), k)


class _Groups(NamedTuple):
    """Lists by number, and the queries that probe each [t, r]."""

    lists: Lists
    numbers: list[int]
    queries: tuple[Tensor, ...]

    def scores(self) -> Iterator[Tensor]:
        """‖k‖² + w ‖k⊥‖² - 2q·k of each group. Shapes: [t, n] int32."""
        begin, codes, norms = self.lists.begin.tolist(), self.lists.codes.T, self.lists.norms
        for number, queries in zip(self.numbers, self.queries, strict=True):
            start, end = begin[number], begin[number + 1]
            yield _scores(queries, codes[:, start:end], norms[start:end])


def _firsts(groups: _Groups, square: Tensor, first: Tensor) -> Tensor | None:
    """The least of each list, of equals the first; None if an estimate has to be cut, since then
    more of them are equal. Shapes: square, first [n, 1] → [n, 1] int64."""
    best = [scores.min(dim=-1, keepdim=True) for scores in groups.scores()]
    estimates = torch.cat([part.values for part in best]) + square
    if not ((estimates >= 0) & (estimates <= FARTHEST)).all():
        return None
    places = first + torch.cat([part.indices for part in best])
    return (estimates.long() << PLACE_BITS) + places


def _best(estimates: Tensor, k: int) -> Tensor:
    """Of each bin of a list, or for one neighbour of the list, the least estimate · LONGEST +
    position, or NOWHERE. Shapes: estimates [T, n] int32 → [T, BINS or 1] int32."""
    count, width = estimates.shape
    kept = 1 if k == 1 else BINS
    position = torch.arange(width, dtype=torch.int32, device=estimates.device)
    packed = torch.add(position, estimates, alpha=LONGEST)
    missing = -width % kept if width else kept
    if missing:
        packed = torch.cat([packed, packed.new_full((count, missing), NOWHERE)], dim=1)
    return packed.view(count, -1, kept).amin(dim=1)


def _widen(packed: Tensor, first: Tensor | int) -> Tensor:
    """As estimate · 2³² + place. Shapes: packed [n, …], see _best; first (places) [n, 1]."""
    wide = packed.long()
    found = (wide // LONGEST << PLACE_BITS) + first + wide % LONGEST
    return found.masked_fill_(packed == NOWHERE, NOT_FOUND)


def decoded(codes: Tensor) -> Tensor:
    """The grid points of codes, as whole fp32 numbers. Shapes: [n, r/2] or [n, r] → [n, r]."""
    return from_codes(unpack(codes), bits=4 if codes.dtype == torch.uint8 else 8)


def _factors(lists: Lists, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Queries as they are multiplied, and ‖q‖². Shapes: whole [T, r] → [T, r], [T, 1] int32."""
    square = whole.square().sum(dim=-1, keepdim=True).int()
    return whole.to(torch.int8) if _bytewise(lists.codes) else whole, square


def _bytewise(codes: Tensor) -> bool:
    """Whether codes are multiplied as bytes."""
    return codes.dtype == torch.int8 and codes.is_cpu and torch.backends.mkldnn.is_available()


def _scores(queries: Tensor, codes: Tensor, norms: Tensor) -> Tensor:
    """‖k‖² + w ‖k⊥‖² - 2q·k. Shapes: queries [T, r]; codes [r or r/2, n]; norms [n] → [T, n]."""
    if _bytewise(codes):
        dots = torch._int_mm(queries, codes)
    else:
        dots = (queries @ decoded(codes.T).T).int()
    return torch.add(norms, dots, alpha=-2, out=dots)


def _least(found: Tensor, k: int) -> Tensor:
    """The k least, ascending, padded with NOT_FOUND. Shapes: [T, n] → [T, k]."""
    best = torch.topk(found, min(k, found.shape[1]), dim=-1, largest=False).values
    return _padded(best, k)


def _padded(found: Tensor, width: int) -> Tensor:
    """NOT_FOUND to the right, in whole numbers (F.pad takes them for floats). → [T, width]."""
    if width == found.shape[1]:
        return found
    missing = found.new_full((len(found), width - found.shape[1]), NOT_FOUND)
    return torch.cat([found, missing], dim=-1)


@torch.library.custom_op("knn_moe::scan", mutates_args=())
def _scan(
    codes: Tensor,
    norms: Tensor,
    centres: Tensor,
    centre_norms: Tensor,
    begin: Tensor,
    whole: Tensor,
    probes: int,
    k: int,
) -> Tensor:
    return scan(Lists(codes, norms, centres, centre_norms, begin), whole, probes, k)


@_scan.register_fake
def _(
    codes: Tensor,
    norms: Tensor,
    centres: Tensor,
    centre_norms: Tensor,
    begin: Tensor,
    whole: Tensor,
    probes: int,
    k: int,
) -> Tensor:
    return whole.new_empty(len(whole), k, dtype=torch.int64)
