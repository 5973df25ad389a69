"""Recall for 1 to 4 queries, as in decoding: `decode_project`, then `decode_recall`.

The time they take is the latency of one chain of loads. So whatever depends on nothing is loaded
first; each query has a program of its own for what need not wait for the lists; and that program
sees what the others found as soon as it is there.

Tested against FastIndex.estimate with mix_logits (tests/index/test_fast_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from knn_moe.index.fast.kernels.mix import dropped_norm, is_top_expert, load_own_logits, mix
from knn_moe.index.fast.kernels.scan import (
    NOT_FOUND,
    allow_next,
    load_query,
    prefetch,
    replace_nan,
    scan_list,
    smallest,
    wait_for_previous,
    widen,
)

EMPTY = tl.constexpr(-1)  # in a slot that no program has written to yet
LINE = tl.constexpr(32)  # numbers of a matrix that one load fetches, at least


@triton.jit
def decode_project(inputs, stacked, shift, centre, constants, projected, found, D, RL, stride,
                   SLOTS: tl.constexpr, FOUND: tl.constexpr, ROWS: tl.constexpr,
                   BLOCK: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Multiply x by the stacked rows, subtract the shift; compute ‖x - c‖².

    Grid (⌈RL / ROWS⌉ + 1, T). Shapes: inputs [T, D]; stacked [RL, D]; shift [RL]; projected
    [T, stride], of which RL + 1 columns are written; found [T, SLOTS], set to EMPTY.
    """
    t = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    column = tl.arange(0, BLOCK)
    inputs += t * D
    projected += t * stride
    allow_next(PDL)
    if first < RL:
        row = first + tl.arange(0, ROWS)
        there = row < RL
        subtracted = tl.load(shift + row, mask=there, other=0.0)
        total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        if PDL:  # the inputs may not be there yet, the matrix is
            begins = stacked + tl.minimum(row, RL - 1).to(tl.int64)[:, None] * D
            line = tl.minimum(LINE * tl.arange(0, BLOCK // LINE), D - 1)
            prefetch(begins + line[None, :], ASM)
        wait_for_previous(PDL)
        for start in range(0, D, BLOCK):
            inside = start + column < D
            x = tl.load(inputs + start + column, mask=inside, other=0.0).to(tl.float32)
            at = row.to(tl.int64)[:, None] * D + (start + column)[None, :]
            weight = tl.load(stacked + at, mask=there[:, None] & inside[None, :], other=0.0)
            total += weight.to(tl.float32) * x[None, :]
        tl.store(projected + row, tl.sum(total, axis=1) - subtracted, mask=there)
    else:
        step = tl.load(constants)
        wait_for_previous(PDL)
        slot = tl.arange(0, FOUND)
        tl.store(found + t * SLOTS + slot, tl.full([FOUND], EMPTY, tl.int64), mask=slot < SLOTS)
        norm = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, D, BLOCK):
            inside = start + column < D
            x = tl.load(inputs + start + column, mask=inside, other=0.0).to(tl.float32)
            x = (x - tl.load(centre + start + column, mask=inside, other=0.0)) / step
            norm += x * x
        tl.store(projected + RL, tl.sum(norm))


@triton.jit
def decode_recall(logits, counts, real, mixed, confidence, projected, found, begin, codes, norms,
                  dropped, constants, value_codes, value_steps, value_centre, L, stride,
                  R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                  PROBES: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
                  COSINE: tl.constexpr, TOP: tl.constexpr, MASKED: tl.constexpr,
                  LP: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
                  MINE: tl.constexpr, FOUND: tl.constexpr, ASM: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Scan up to MINE lists for one query; the last program mixes. Grid (programs + 1, T).

    Each program ranks its lists among all, and scans those among the PROBES nearest. Shapes:
    projected [T, stride]: coordinates [R], coarse distances [L], ‖x - c‖²; found [T, PROBES, KP],
    EMPTY; counts [4] and real [T]: see `mix`.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0) - 1
    t = tl.program_id(1)
    projected += t.to(tl.int64) * stride
    found += t * PROBES * KP
    if program == programs:
        wait_for_previous(PDL)
        own, proposal = load_own_logits(logits, value_centre, t, N, NP)
        dim = tl.arange(0, RP)
        point = tl.load(projected + dim, mask=dim < R, other=0.0)
        query_dropped = dropped_norm(tl.load(projected + R + L), point)
        if t == 0:
            tl.atomic_add(counts, 1, sem="relaxed")
        chosen = tl.zeros([NP], dtype=tl.int1)
        if TOP > 0:
            chosen = is_top_expert(logits, t, N, NP, TOP)
        slot = tl.arange(0, FOUND)
        written = slot < PROBES * KP
        seen = tl.load(found + slot, mask=written, other=NOT_FOUND, volatile=True)
        while tl.min(seen, axis=0) == EMPTY:
            seen = tl.load(found + slot, mask=written, other=NOT_FOUND, volatile=True)
        mix(t, seen, query_dropped, chosen, own, proposal, dropped, constants, value_codes,
            value_steps, mixed, confidence, counts, real, N, K, KP, VALUE_BITS, COSINE, TOP, MASKED,
            NP)  # fmt: skip
    else:
        turn = tl.arange(0, MINE)
        number = program + programs * turn
        there = number < L
        start = tl.load(begin + number, mask=there, other=0)
        size = tl.load(begin + number + 1, mask=there, other=0) - start
        wait_for_previous(PDL)
        low, high, constant = load_query(projected, projected, R, BITS, WP, False)
        other = tl.arange(0, LP)
        coarse = replace_nan(tl.load(projected + R + other, mask=other < L, other=float("inf")))
        mine = replace_nan(tl.load(projected + R + number, mask=there, other=float("inf")))
        nearer = (coarse[None, :] < mine[:, None]) | (
            (coarse[None, :] == mine[:, None]) & (other[None, :] < number[:, None])
        )
        ranks = tl.where(there, tl.sum(nearer.to(tl.int32), axis=1), L)
        for now in range(MINE):
            rank = tl.sum(tl.where(turn == now, ranks, 0))
            if rank < PROBES:
                first = tl.sum(tl.where(turn == now, start, 0))
                keys = tl.sum(tl.where(turn == now, size, 0))
                nearest = scan_list(low, high, constant, codes, norms, first, keys,
                                    R * BITS // 32, BITS, WP, ASM, True)  # fmt: skip
                best = widen(smallest(nearest, KP), first)
                tl.store(found + rank * KP + tl.arange(0, KP), best)
                place = tl.where(best != NOT_FOUND, best & 0xFFFFFFFF, 0)
                WIDTH: tl.constexpr = (N + 1) // 2 if VALUE_BITS == 4 else N
                prefetch(value_codes + place * WIDTH, ASM)
                prefetch(value_codes + place * WIDTH + WIDTH - 1, ASM)
                prefetch(value_steps + place, ASM)
                prefetch(dropped + place, ASM)
