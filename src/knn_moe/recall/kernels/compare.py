"""Comparing tokens with prototypes: a softmax over each part of them, and the update it weighs.

log s_j = -γ (‖x - c‖² + offset_j - 2 x·f_j), where f_j is a prototype around the centre c. The norm
is the same for all prototypes, so it is left to `mix_prototypes`, and a softmax over a part of the
prototypes is kept as its largest logarithm, its sum and its update, as in flash decoding.

Tested against DistilledRecall in plain torch (tests/recall/test_distilled_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from knn_moe.index.fast.kernels.mix import LOWEST
from knn_moe.index.fast.kernels.scan import allow_next, prefetch, wait_for_previous

LINE = tl.constexpr(32)  # numbers of a factor that one prefetch brings
PRECISION = tl.constexpr("tf32x3")  # of products of fp32 numbers: as exact as fp32


@triton.jit
def multiply(inputs, factors, token, here, row, there, D: tl.constexpr, TOKENS: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Return x·f in fp32, multiplied in the factors' dtype. Result [TOKENS, ROWS].

    Shapes: token, here [TOKENS]; row, there [ROWS].
    """
    column = tl.arange(0, COLUMNS)
    x_at = inputs + token.to(tl.int64)[:, None] * D + column[None, :]
    if TOKENS == 1:
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        factor_at = factors + row.to(tl.int64)[:, None] * D + column[None, :]
        for start in range(0, D, COLUMNS):
            inside = (start + column < D)[None, :]
            factor = tl.load(factor_at + start, mask=there[:, None] & inside, other=0.0)
            x = tl.load(x_at + start, mask=here[:, None] & inside, other=0.0)
            total += factor.to(tl.float32) * x.to(factor.dtype).to(tl.float32)
        products = tl.sum(total, axis=1)[None, :]
    else:
        products = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
        factor_at = factors + row.to(tl.int64)[None, :] * D + column[:, None]
        for start in range(0, D, COLUMNS):
            inside = start + column < D
            factor = tl.load(factor_at + start, mask=inside[:, None] & there[None, :], other=0.0)
            x = tl.load(x_at + start, mask=here[:, None] & inside[None, :], other=0.0)
            products = tl.dot(x.to(factor.dtype), factor, products, input_precision=PRECISION)
    return products


@triton.jit
def walk(inputs, factors, offsets, updates, gamma, token, here, begin, end, D: tl.constexpr,
         N: tl.constexpr, SPAN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
         COLUMNS: tl.constexpr, NP: tl.constexpr):  # fmt: skip
    """Take the softmax over the prototypes from `begin` to `end`.

    Returns the largest log s [TOKENS], but for the norm; Σ s relative to it [TOKENS]; and Σ s u
    relative to it [TOKENS, NP].
    """
    expert = tl.arange(0, NP)
    most = tl.full([TOKENS], LOWEST, dtype=tl.float32)
    total = tl.zeros([TOKENS], dtype=tl.float32)
    update = tl.zeros([TOKENS, NP], dtype=tl.float32)
    for first in range(0, SPAN, ROWS):
        row = begin + first + tl.arange(0, ROWS)
        there = row < end
        products = multiply(inputs, factors, token, here, N + row, there, D, TOKENS, ROWS, COLUMNS)
        offset = tl.load(offsets + row, mask=there, other=0.0)
        log_similarity = gamma * (2 * products - offset[None, :])
        log_similarity = tl.where(there[None, :], log_similarity, float("-inf"))
        larger = tl.maximum(most, tl.max(log_similarity, axis=1))
        weight = tl.exp(log_similarity - larger[:, None])
        shrink = tl.exp(most - larger)
        value = tl.load(
            updates + row.to(tl.int64)[:, None] * N + expert[None, :],
            mask=there[:, None] & (expert < N)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weight, axis=1)
        update = update * shrink[:, None]
        if TOKENS == 1:
            update += tl.sum(tl.trans(weight) * value, axis=0)[None, :]
        else:
            update = tl.dot(weight, value, update, input_precision=PRECISION)
        most = larger
    return most, total, update


@triton.jit
def compare_prototypes(inputs, slots, scratch, factors, offsets, updates, sizes, widths, T, P,
                       D: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
                       SPLITS: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr,
                       TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                       NP: tl.constexpr, LINES: tl.constexpr, PREFETCH: tl.constexpr,
                       ASM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Compare tokens with SPAN prototypes of a memory; the last programs multiply by W.

    Grid (SPLITS + ⌈N / ROWS⌉, ⌈T / TOKENS⌉, S). Shapes: inputs [T, D]; slots [T]; factors
    [S, N + P, D], W and below it the prototypes; offsets [S, P]; updates [S, P, N]; sizes [S];
    widths [S, 4], γ first. Written: scratch [T, STRIDE]: an update of each split [SPLITS, NP], W x
    [NP], the largest log s and the sum of each split, both [SPLITS].
    """
    part = tl.program_id(0)
    memory = tl.program_id(2)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    here = token < T
    factors += memory.to(tl.int64) * (N + P) * D
    begin = part * SPAN
    line = (part - SPLITS) * ROWS + tl.arange(0, ROWS)  # of W
    allow_next(PDL)
    if PREFETCH:  # the inputs may not be there yet, the factors are
        row = tl.where(part < SPLITS, N + begin + tl.arange(0, ROWS), line)
        row = tl.minimum(row, N + P - 1).to(tl.int64)
        column = tl.minimum(LINE * tl.arange(0, LINES), D - 1)
        prefetch(factors + row[:, None] * D + column[None, :], ASM)
    wait_for_previous(PDL)
    if SLOTS:
        here = here & (tl.load(slots + token, mask=here, other=-1) == memory)
    size = tl.load(sizes + memory)
    gamma = tl.load(widths + 4 * memory)
    if tl.max(here.to(tl.int32), axis=0) > 0:
        place = scratch + token.to(tl.int64) * STRIDE
        if part >= SPLITS:
            there = line < N
            products = multiply(inputs, factors, token, here, line, there, D, TOKENS, ROWS, COLUMNS)
            at = place[:, None] + SPLITS * NP + line[None, :]
            tl.store(at, products, mask=here[:, None] & there[None, :])
        elif begin < size:
            most, total, update = walk(
                inputs, factors, offsets + memory.to(tl.int64) * P,
                updates + memory.to(tl.int64) * P * N, gamma, token, here, begin, size, D, N, SPAN,
                TOKENS, ROWS, COLUMNS, NP,
            )  # fmt: skip
            at = place[:, None] + part * NP + tl.arange(0, NP)[None, :]
            tl.store(at, update, mask=here[:, None])
            tl.store(place + (SPLITS + 1) * NP + part, most, mask=here)
            tl.store(place + (SPLITS + 1) * NP + SPLITS + part, total, mask=here)
