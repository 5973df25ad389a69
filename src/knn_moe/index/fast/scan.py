"""The search of `fast`, in plain torch: the nearest lists, then the nearest keys in them.

Every number is whole, so every way to compute it gives the same result: the two here, and the
kernels (kernels/), which are tested against them. Shapes: T queries, L lists, M keys, r dimensions.
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
BINS: Final = 128  # of keys in a list that are BINS places apart, only the nearest is kept
_ONE_BY_ONE: Final = 8  # queries up to which each is searched on its own


class Lists(NamedTuple):
    """Keys in lists.

    Shapes: codes [M, r/2] uint8 or [M, r] int8; norms [M] int32, ‖k‖² + w ‖k⊥‖²; centres [L, r],
    whole numbers; centre_norms [L] fp32, ‖c‖²; begin [L + 1] int32, the lists' first places.
    """

    codes: Tensor
    norms: Tensor
    centres: Tensor
    centre_norms: Tensor
    begin: Tensor


def scan(lists: Lists, points: Tensor, probes: int, k: int) -> Tensor:
    """Return the k smallest estimate · 2³² + place among the keys of the nearest lists, ascending.

    estimate = min(‖q - k‖² + w ‖k⊥‖², FARTHEST). A key's place breaks ties. Of keys in a list that
    are BINS places apart only the nearest counts: choosing k of a quarter of the keys is cheaper,
    and seldom loses one. Where fewer than k are left, the rest is NOT_FOUND.

    Args:
        lists: The keys.
        points: The queries, rounded to the grid. Shape [T, r] fp32.
        probes: How many lists to search for each query.
        k: How many keys to find.

    Returns:
        Shape [T, k] int64.
    """
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.knn_moe.scan(list(lists), points, probes, k)
        return found
    probed = nearest_lists(lists, points, probes)
    if len(points) <= _ONE_BY_ONE:
        return _scan_each(lists, points, probed, k)
    return _scan_grouped(lists, points, probed, k)


def nearest_lists(lists: Lists, points: Tensor, probes: int) -> Tensor:
    """Return the lists nearest by ‖c‖² - 2q·c, ties to the lower number.

    Shapes: points [T, r] → [T, probes] int64.
    """
    coarse = torch.add(lists.centre_norms, points @ lists.centres.float().T, alpha=-2)
    numbers = torch.arange(len(lists.centres), device=points.device)
    ranked = (coarse.long() << PLACE_BITS) + numbers
    nearest = torch.topk(ranked, probes, dim=-1, largest=False).values
    numbers_only: Tensor = nearest & (2**PLACE_BITS - 1)
    return numbers_only


def _scan_each(lists: Lists, points: Tensor, probed: Tensor, k: int) -> Tensor:
    """Search query by query, each through its lists side by side."""
    queries, square = _factors(lists, points)
    results = [probed.new_empty(0, k)]
    probed = probed.sort(dim=-1).values
    spans = torch.stack([lists.begin[probed], lists.begin[probed + 1]], dim=-1).tolist()
    for at, ends in enumerate(spans):
        # Small arrays: numpy is faster than torch.
        side_by_side = np.concatenate([np.arange(*span) for span in ends])
        places = torch.from_numpy(side_by_side).to(points.device)
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
        results.append(_smallest(torch.cat(found, dim=1), k))
    return torch.cat(results)


def _scan_grouped(lists: Lists, points: Tensor, probed: Tensor, k: int) -> Tensor:
    """Search list by list, each for all queries that probe it."""
    probed_lists, pairs = torch.sort(probed.flatten(), stable=True)
    queries, square = (part[pairs // probed.shape[1]] for part in _factors(lists, points))
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
    return _smallest(ordered.view(len(points), -1), k)


class _Groups(NamedTuple):
    """Lists by number, and the queries [t, r] that probe each of them."""

    lists: Lists
    numbers: list[int]
    queries: tuple[Tensor, ...]

    def scores(self) -> Iterator[Tensor]:
        """Yield ‖k‖² + w ‖k⊥‖² - 2q·k of each group. Shapes: [t, n] int32."""
        begin, codes, norms = self.lists.begin.tolist(), self.lists.codes.T, self.lists.norms
        for number, queries in zip(self.numbers, self.queries, strict=True):
            start, end = begin[number], begin[number + 1]
            yield _scores(queries, codes[:, start:end], norms[start:end])


def _firsts(groups: _Groups, square: Tensor, first: Tensor) -> Tensor | None:
    """Return the nearest of each list, ties to the first; None if an estimate has to be clamped,
    which makes more ties. Shapes: square, first [n, 1] → [n, 1] int64."""
    best = [scores.min(dim=-1, keepdim=True) for scores in groups.scores()]
    estimates = torch.cat([part.values for part in best]) + square
    if not ((estimates >= 0) & (estimates <= FARTHEST)).all():
        return None
    places = first + torch.cat([part.indices for part in best])
    return (estimates.long() << PLACE_BITS) + places


def _best(estimates: Tensor, k: int) -> Tensor:
    """Return the smallest estimate · LONGEST + position of each bin, for k = 1 of the whole list,
    or NOWHERE. Shapes: estimates [T, n] int32 → [T, BINS or 1] int32."""
    count, width = estimates.shape
    kept = 1 if k == 1 else BINS
    position = torch.arange(width, dtype=torch.int32, device=estimates.device)
    packed = torch.add(position, estimates, alpha=LONGEST)
    missing = -width % kept if width else kept
    if missing:
        packed = torch.cat([packed, packed.new_full((count, missing), NOWHERE)], dim=1)
    return packed.view(count, -1, kept).amin(dim=1)


def _widen(packed: Tensor, first: Tensor | int) -> Tensor:
    """Return estimate · 2³² + place. Shapes: packed [n, …], see `_best`; first (places) [n, 1]."""
    wide = packed.long()
    found = (wide // LONGEST << PLACE_BITS) + first + wide % LONGEST
    return found.masked_fill_(packed == NOWHERE, NOT_FOUND)


def decode_codes(codes: Tensor) -> Tensor:
    """Return the grid points of codes in fp32. Shapes: [n, r/2] or [n, r] → [n, r]."""
    return from_codes(unpack(codes), bits=4 if codes.dtype == torch.uint8 else 8)


def _factors(lists: Lists, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries in the dtype they are multiplied in, and ‖q‖² [T, 1] int32."""
    square = points.square().sum(dim=-1, keepdim=True).int()
    return points.to(torch.int8) if _uses_bytes(lists.codes) else points, square


def _uses_bytes(codes: Tensor) -> bool:
    """Return whether codes are multiplied as bytes."""
    return codes.dtype == torch.int8 and codes.is_cpu and torch.backends.mkldnn.is_available()


def _scores(queries: Tensor, codes: Tensor, norms: Tensor) -> Tensor:
    """Return ‖k‖² + w ‖k⊥‖² - 2q·k.

    Shapes: queries [T, r]; codes [r or r/2, n]; norms [n] → [T, n] int32.
    """
    if _uses_bytes(codes):
        dots = torch._int_mm(queries, codes)
    else:
        dots = (queries @ decode_codes(codes.T).T).int()
    return torch.add(norms, dots, alpha=-2, out=dots)


def _smallest(found: Tensor, k: int) -> Tensor:
    """Return the k smallest, ascending, padded with NOT_FOUND. Shapes: [T, n] → [T, k]."""
    best = torch.topk(found, min(k, found.shape[1]), dim=-1, largest=False).values
    missing = k - best.shape[1]
    if not missing:
        return best
    # F.pad would pad with floats.
    return torch.cat([best, best.new_full((len(best), missing), NOT_FOUND)], dim=-1)


@torch.library.custom_op("knn_moe::scan", mutates_args=())
def _scan(lists: list[Tensor], points: Tensor, probes: int, k: int) -> Tensor:
    return scan(Lists(*lists), points, probes, k)


@_scan.register_fake
def _(lists: list[Tensor], points: Tensor, probes: int, k: int) -> Tensor:
    return points.new_empty(len(points), k, dtype=torch.int64)
