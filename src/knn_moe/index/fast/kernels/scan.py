"""The search as the kernels share it: queries as words, scanning a list, keeping the smallest.

A result is estimate · 512 + position within a list, and estimate · 2³² + place outside it.
Tested against index/fast/scan.py, through the kernels that use it.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOT_FOUND = tl.constexpr(2**63 - 1)
NOWHERE = tl.constexpr(2**31 - 1)  # not found, within a list
FARTHEST = tl.constexpr((1 << 22) - 2)
LONGEST = tl.constexpr(512)  # keys of a list
BINS = tl.constexpr(128)  # of the keys of a list 128 places apart, only the nearest is kept
FAR = tl.constexpr(3e38)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it and taking it off rounds half to even


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel has ended; what does not depend on it comes before this."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def allow_next(PDL: tl.constexpr):
    """Allow the next kernel to be launched; it waits for the end of this one itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, ASM: tl.constexpr):
    """Load into the cache what another program will read soon."""
    if ASM:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32,
            False, 1,
        )  # fmt: skip


@triton.jit
def round_to_grid(projected):
    """Return the nearest grid point, as grid.round_to_grid does."""
    inside = tl.minimum(tl.maximum(projected, -127.0), 127.0)
    return (inside + ROUNDER) - ROUNDER


@triton.jit
def replace_nan(distance):
    """Replace NaN: a query that is not a number must still get PROBES different lists."""
    return tl.where(distance == distance, distance, FAR)


@triton.jit
def smallest(numbers, KP: tl.constexpr):
    """Return the KP smallest of a vector, ascending."""
    if KP == 1:
        best = tl.min(numbers, axis=0, keep_dims=True)
    else:
        best = -tl.topk(-numbers, KP)
    return best


@triton.jit
def nearest_lists(distance, number, there, PROBES: tl.constexpr, PP: tl.constexpr):
    """Return the numbers of the PROBES nearest lists, ties to the lower. Result [PP] int32."""
    # As whole numbers of the same order, with the list's number in the low half: one minimum finds
    # both.
    bits = (replace_nan(distance) + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    ranked = tl.where(there, (ordered << 32) | number, NOT_FOUND)
    probe = tl.arange(0, PP)
    nearest = tl.zeros([PP], dtype=tl.int32)
    for turn in range(PROBES):
        best = tl.min(ranked, axis=0)
        nearest = tl.where(probe == turn, (best & 0xFFFFFFFF).to(tl.int32), nearest)
        ranked = tl.where(ranked == best, NOT_FOUND, ranked)
    return nearest


@triton.jit
def pack_estimates(constant, norm, dots, position, inside, BITS: tl.constexpr):
    """Return estimate · 512 + position, from q·code (grid.from_codes is in `constant`)."""
    if BITS == 4:
        dots = dots * 16
    estimate = tl.minimum(tl.maximum(constant + norm - 2 * dots, 0), FARTHEST)
    return tl.where(inside, estimate * LONGEST + position, NOWHERE)


@triton.jit
def widen(found, start):
    """Turn estimate · 512 + position in a list into estimate · 2³² + place."""
    wide = ((found // LONGEST).to(tl.int64) << 32) + start + found % LONGEST
    return tl.where(found == NOWHERE, NOT_FOUND, wide)


@triton.jit
def load_query_words(projected, shift, word, there, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """Return four coordinates of a query to a word, and their part of the constant."""
    words = tl.zeros_like(word)
    energy = tl.zeros_like(word)
    for byte in tl.static_range(4):
        at = 4 * word + byte
        exact = tl.load(projected + at, mask=there, other=0.0)
        if SHIFT:
            exact -= tl.load(shift + at, mask=there, other=0.0)
        point = round_to_grid(exact).to(tl.int32)
        words |= (point & 255) << (8 * byte)
        energy += point * point
        if BITS == 4:
            # A code n stands for 16n - 120, n from 0 to 15.
            energy += 240 * point
    return words, energy


@triton.jit
def load_query(projected, shift, R: tl.constexpr, BITS: tl.constexpr, WP: tl.constexpr,
               SHIFT: tl.constexpr):  # fmt: skip
    """Return a query as words, for the low and high halves of codes, and the constant of
    `pack_estimates`. SHIFT: the shift is still to be subtracted.
    """
    word = tl.arange(0, WP)
    there = word < R * BITS // 32
    low, energy = load_query_words(projected, shift, word, there, BITS, SHIFT)
    high = low
    if BITS == 4:
        high, more = load_query_words(projected + R // 2, shift + R // 2, word, there, BITS, SHIFT)
        energy += more
    return low, high, tl.sum(energy)


@triton.jit
def dot4(codes, query, total, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """Return total + the sum of four products: bytes of `codes` with signed bytes of `query`."""
    if ASM and SIGNED:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, query, total], tl.int32, True, 1
        )
    elif ASM:
        total = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, query, total], tl.int32, True, 1
        )
    else:
        for byte in tl.static_range(4):
            code = (codes << (24 - 8 * byte)) >> 24
            if not SIGNED:
                code &= 255
            total += code * ((query << (24 - 8 * byte)) >> 24)
    return total


@triton.jit
def scan_block(low, high, constant, codes, norms, start, size, word, first, WORDS: tl.constexpr,
               BITS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return `pack_estimates` of BINS keys of a list, for one query."""
    position = first + tl.arange(0, BINS)
    inside = position < size
    norm = tl.load(norms + start + position, mask=inside, other=0)
    at = (start + position).to(tl.int64)[:, None] * WORDS + word[None, :]
    code = tl.load(codes + at, mask=inside[:, None] & (word < WORDS)[None, :], other=0)
    low = tl.broadcast_to(low[None, :], code.shape)
    high = tl.broadcast_to(high[None, :], code.shape)
    dots = tl.zeros_like(code)
    if BITS == 4:
        dots = dot4(code & 0x0F0F0F0F, low, dots, False, ASM)
        dots = dot4((code >> 4) & 0x0F0F0F0F, high, dots, False, ASM)
    else:
        dots = dot4(code, low, dots, True, ASM)
    return pack_estimates(constant, norm, tl.sum(dots, axis=1), position, inside, BITS)


@triton.jit
def scan_list(low, high, constant, codes, norms, start, size, WORDS: tl.constexpr,
              BITS: tl.constexpr, WP: tl.constexpr, ASM: tl.constexpr,
              AT_ONCE: tl.constexpr):  # fmt: skip
    """Return the nearest key of each bin of a list, as `pack_estimates` does, for one query.

    AT_ONCE: all loads in flight together, for the shortest delay; otherwise one after the other,
    in fewer registers, for the most programs at a time.
    """
    word = tl.arange(0, WP)
    nearest = tl.full([BINS], NOWHERE, dtype=tl.int32)
    if AT_ONCE:
        for first in tl.static_range(0, LONGEST, BINS):
            part = scan_block(low, high, constant, codes, norms, start, size, word, first, WORDS,
                              BITS, ASM)  # fmt: skip
            nearest = tl.minimum(nearest, part)
    else:
        for first in range(0, size, BINS):
            part = scan_block(low, high, constant, codes, norms, start, size, word, first, WORDS,
                              BITS, ASM)  # fmt: skip
            nearest = tl.minimum(nearest, part)
    return nearest
