"""The search of `fast`, in plain torch: nearest lists, then nearest keys in them.

Everything is a whole number, so every way of computing it gives the same result: these, and the
kernels (kernels.py) that are tested against them. Shapes: T queries, L lists, M keys, r dims.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.index.grid import FARTHEST, from_codes
from knn_moe.index.packing import unpack

PLACE_BITS: Final = 32  # a result is estimate · 2³² + place
NOT_FOUND: Final = torch.iinfo(torch.int64).max
BINS: Final = 128  # of the keys of a list BINS places apart, only the nearest is kept
_FEW: Final = 8  # queries that are looked up one by one


class Lists(NamedTuple):
    """Keys in lists. Shapes: codes [M, r/2] uint8 or [M, r] int8; norms [M] int32, ‖k‖² with a
    share of ‖k⊥‖²; centres [L, r] int8; begin [L + 1] int32, the lists' first places."""

    codes: Tensor
    norms: Tensor
    centres: Tensor
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
    centres = lists.centres.float()
    coarse = centres.square().sum(dim=-1) - 2 * whole @ centres.T
    numbers = torch.arange(len(centres), device=whole.device)
    ranked = (coarse.long() << PLACE_BITS) + numbers
    nearest = torch.topk(ranked, probes, dim=-1, largest=False).values
    numbers_only: Tensor = nearest & (2**PLACE_BITS - 1)
    return numbers_only


def _scan_each(lists: Lists, whole: Tensor, probed: Tensor, k: int) -> Tensor:
    """One query after the other, its lists side by side."""
    begin = lists.begin.tolist()
    everywhere = torch.arange(len(lists.codes), device=whole.device)
    results = [probed.new_empty(0, k)]
    for query, numbers in zip(whole[:, None], probed.tolist(), strict=True):
        spans = [slice(begin[number], begin[number + 1]) for number in numbers]
        codes, norms, places = (
            torch.cat([part[span] for span in spans])
            for part in (lists.codes, lists.norms, everywhere)
        )
        estimates = _estimates(query, _square(query), codes, norms)
        found = (estimates.long() << PLACE_BITS) + places
        if k > 1:
            at = torch.cat([_bins(slot, span) for slot, span in enumerate(spans)])
            binned = found.new_full((1, len(spans) * BINS), NOT_FOUND)
            found = binned.scatter_reduce(1, at.to(found.device)[None], found, "amin")
        results.append(_least(found, k))
    return torch.cat(results)


def _bins(slot: int, span: slice) -> Tensor:
    """The bin of each key of the list that is the `slot`-th of a query's."""
    return slot * BINS + torch.arange(span.stop - span.start) % BINS


def _scan_grouped(lists: Lists, whole: Tensor, probed: Tensor, k: int) -> Tensor:
    """One list after the other, for all queries that probe it.

    Of each list its bins' least, or for one neighbour its least alone.
    """
    probes, kept = probed.shape[1], 1 if k == 1 else BINS
    begin = lists.begin.tolist()
    square = _square(whole)
    everywhere = torch.arange(len(lists.codes), device=whole.device)
    found = torch.full((probed.numel(), kept), NOT_FOUND, device=whole.device)
    pairs = torch.argsort(probed.flatten(), stable=True)
    numbers, counts = torch.unique_consecutive(probed.flatten()[pairs], return_counts=True)
    groups = zip(
        numbers.tolist(),
        pairs.split(counts.tolist()),
        (pairs // probes).split(counts.tolist()),
        strict=True,
    )
    for number, group, asking in groups:
        span = slice(begin[number], begin[number + 1])
        estimates = _estimates(whole[asking], square[asking], lists.codes[span], lists.norms[span])
        ranked = (estimates.long() << PLACE_BITS).add_(everywhere[span])
        width = -(-ranked.shape[1] // kept) * kept
        found[group] = _padded(ranked, width).view(len(group), -1, kept).amin(dim=1)
    return _least(found.view(len(whole), -1), k)


def decoded(codes: Tensor) -> Tensor:
    """The grid points of codes, as whole fp32 numbers. Shapes: [n, r/2] or [n, r] → [n, r]."""
    return from_codes(unpack(codes), bits=4 if codes.dtype == torch.uint8 else 8)


def _square(queries: Tensor) -> Tensor:
    """‖q‖². Shapes: queries [T, r] → [T, 1] int32."""
    return queries.square().sum(dim=-1, keepdim=True).int()


def _estimates(queries: Tensor, square: Tensor, codes: Tensor, norms: Tensor) -> Tensor:
    """min(‖q - k‖² + w ‖k⊥‖², FARTHEST). Shapes: queries [T, r]; square [T, 1]; codes [n, …];
    norms [n] → [T, n] int32."""
    if codes.dtype == torch.int8 and codes.is_cpu and torch.backends.mkldnn.is_available():
        dots = torch._int_mm(queries.to(torch.int8), codes.T)
    else:
        dots = (queries @ decoded(codes).T).int()
    return dots.mul_(-2).add_(norms).add_(square).clamp_(0, FARTHEST)


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
    codes: Tensor, norms: Tensor, centres: Tensor, begin: Tensor, whole: Tensor, probes: int, k: int
) -> Tensor:
    return scan(Lists(codes, norms, centres, begin), whole, probes, k)


@_scan.register_fake
def _(
    codes: Tensor, norms: Tensor, centres: Tensor, begin: Tensor, whole: Tensor, probes: int, k: int
) -> Tensor:
    return whole.new_empty(len(whole), k, dtype=torch.int64)
