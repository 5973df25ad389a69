"""Search for more than 256 queries, as in prefill: each list for all queries that probe it.

`round_queries`, a matrix product, `queue_up`, `scan_queues` on matrix units, then mix.py's
`mix_found` or `merge_found`. Tested against FastIndex.estimate (tests/index/test_fast_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from knn_moe.index.fast.kernels.scan import (
    BINS,
    NOWHERE,
    nearest_lists,
    pack_estimates,
    round_to_grid,
    widen,
)


@triton.jit
def round_queries(projected, shift, points, size, R: tl.constexpr, BLOCK: tl.constexpr):
    """Round projected queries to the grid. Shapes: projected, points [T, R]; size = T · R."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    point = tl.load(projected + at, mask=inside, other=0.0)
    point -= tl.load(shift + at % R, mask=inside, other=0.0)
    tl.store(points + at, round_to_grid(point).to(points.dtype.element_ty), mask=inside)


@triton.jit
def queue_up(coarse, point_norms, queues, lengths, T, L, PROBES: tl.constexpr, PP: tl.constexpr,
             LP: tl.constexpr):  # fmt: skip
    """Add a query to the queues of its nearest lists. Grid (T,).

    Shapes: coarse [T, L], q·c; point_norms [L]; queues [L, T], of query · PROBES + probe; lengths
    [L], 0 before.
    """
    t = tl.program_id(0)
    number = tl.arange(0, LP)
    there = number < L
    distance = -2.0 * tl.load(coarse + t.to(tl.int64) * L + number, mask=there, other=0.0)
    distance += tl.load(point_norms + number, mask=there, other=0.0)
    nearest = nearest_lists(distance, number, there, PROBES, PP)
    probe = tl.arange(0, PP)
    wanted = probe < PROBES
    turns = tl.atomic_add(lengths + nearest, 1, mask=wanted, sem="relaxed")
    tl.store(queues + nearest.to(tl.int64) * T + turns, t * PROBES + probe, mask=wanted)


@triton.jit
def scan_queues(points, codes, norms, begin, queues, lengths, found, T, R: tl.constexpr,
                BITS: tl.constexpr, KP: tl.constexpr, PROBES: tl.constexpr, QUERIES: tl.constexpr,
                CHUNK: tl.constexpr):  # fmt: skip
    """Scan a list for the queries of its queue, QUERIES at a time. Grid (L, programs of a list).

    CHUNK bytes of a code are multiplied at a time; it divides their number.
    Shapes: points [T, R]; found [T, PROBES, KP] int64.
    """
    number = tl.program_id(0)
    length = tl.load(lengths + number)
    start = tl.load(begin + number)
    size = tl.load(begin + number + 1) - start
    byte = tl.arange(0, CHUNK)
    WIDTH: tl.constexpr = R * BITS // 8
    for first in range(tl.program_id(1) * QUERIES, length, tl.num_programs(1) * QUERIES):
        turn = first + tl.arange(0, QUERIES)
        waiting = turn < length
        pair = tl.load(queues + number.to(tl.int64) * T + turn, mask=waiting, other=0)
        query = points + (pair // PROBES).to(tl.int64)[:, None] * R + byte[None, :]
        constant = tl.zeros([QUERIES], dtype=tl.int32)
        for at in tl.static_range(0, R, CHUNK):
            point = tl.load(query + at).to(tl.int32)
            constant += tl.sum(point * point, axis=1)
            if BITS == 4:
                constant += 240 * tl.sum(point, axis=1)
        nearest = tl.full([QUERIES, BINS], NOWHERE, dtype=tl.int32)
        for block in range(0, size, BINS):
            position = block + tl.arange(0, BINS)
            inside = position < size
            key = codes + (start + position).to(tl.int64)[None, :] * WIDTH + byte[:, None]
            dots = tl.zeros([QUERIES, BINS], dtype=tl.int32)
            for at in tl.static_range(0, WIDTH, CHUNK):
                code = tl.load(key + at, mask=inside[None, :], other=0)
                low = tl.load(query + at).to(tl.int8)
                if BITS == 4:
                    high = tl.load(query + WIDTH + at).to(tl.int8)
                    dots = tl.dot(low, (code & 15).to(tl.int8), dots, out_dtype=tl.int32)
                    dots = tl.dot(high, (code >> 4).to(tl.int8), dots, out_dtype=tl.int32)
                else:
                    dots = tl.dot(low, code, dots, out_dtype=tl.int32)
            norm = tl.load(norms + start + position, mask=inside, other=0)[None, :]
            part = pack_estimates(
                constant[:, None], norm, dots, position[None, :], inside[None, :], BITS
            )
            nearest = tl.minimum(nearest, part)
        slot = found + pair.to(tl.int64) * KP
        for neighbour in range(KP):
            best = tl.min(nearest, axis=1)
            tl.store(slot + neighbour, widen(best, start), mask=waiting)
            nearest = tl.where(nearest == best[:, None], NOWHERE, nearest)
