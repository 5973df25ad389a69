"""Recall for 5 to 256 queries, as in batched decoding: `choose_lists`, then `scan_pairs`.

A matrix product comes before them. Without mixing (MIX = 0) they serve fewer queries too.
Tested against FastIndex.estimate with mix_logits (tests/index/test_fast_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from knn_moe.index.fast.kernels.mix import (
    centred_norm,
    dropped_norm,
    is_top_expert,
    load_coordinates,
    load_own_logits,
    mix,
)
from knn_moe.index.fast.kernels.scan import (
    NOT_FOUND,
    allow_next,
    load_query,
    nearest_lists,
    scan_list,
    smallest,
    wait_for_previous,
    widen,
)


@triton.jit
def choose_lists(inputs, logits, projected, shift, centre, constants, lists, words, early,
                 arrived, L, D, stride, R: tl.constexpr, N: tl.constexpr, PROBES: tl.constexpr,
                 BITS: tl.constexpr, TOP: tl.constexpr, PP: tl.constexpr, LP: tl.constexpr,
                 DP: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """Choose a query's nearest lists; a second program computes what needs no key. Grid (T, 2).

    Shapes: projected [T, stride]: coordinates [R] and coarse distances [L], the shift still to be
    subtracted; lists [T, PROBES]; words [T, 2 · WP + 1], see `load_query`; early [T, 1 + NP]:
    ‖x⊥‖² and which experts the router's own logits choose; arrived [T], set to 0.
    """
    t = tl.program_id(0).to(tl.int64)
    projected += t * stride
    allow_next(PDL)
    wait_for_previous(PDL)
    if tl.program_id(1) == 0:
        number = tl.arange(0, LP)
        there = number < L
        distance = tl.load(projected + R + number, mask=there, other=0.0)
        distance -= tl.load(shift + R + number, mask=there, other=0.0)
        nearest = nearest_lists(distance, number, there, PROBES, PP)
        probe = tl.arange(0, PP)
        tl.store(lists + t * PROBES + probe, nearest, mask=probe < PROBES)
    else:
        tl.store(arrived + t, 0)
        low, high, constant = load_query(projected, shift, R, BITS, WP, True)
        word = tl.arange(0, WP)
        words += t * (2 * WP + 1)
        tl.store(words + word, low)
        tl.store(words + WP + word, high)
        tl.store(words + 2 * WP, constant)
        square = centred_norm(inputs + t * D, centre, tl.load(constants), D, DP)
        early += t * (1 + NP)
        tl.store(early, dropped_norm(square, load_coordinates(projected, shift, R, RP)))
        if TOP > 0:
            chosen = is_top_expert(logits, t, N, NP, TOP)
            tl.store(early + 1 + tl.arange(0, NP), chosen.to(tl.float32))


@triton.jit
def scan_pairs(logits, counts, real, mixed, confidence, words, early, arrived, lists, found, begin,
               codes, norms, dropped, constants, value_codes, value_steps, value_centre,
               R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
               PROBES: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
               COSINE: tl.constexpr, TOP: tl.constexpr, MASKED: tl.constexpr, NP: tl.constexpr,
               WP: tl.constexpr, FOUND: tl.constexpr, MIX: tl.constexpr, ASM: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """Scan one list for one query; MIX: its last program to arrive mixes. Grid (T · PROBES,).

    Shapes: words, early, arrived, lists: see `choose_lists`; found [T, PROBES, KP]; counts [4]
    and real [T]: see `mix`.
    """
    pair = tl.program_id(0)
    t = pair // PROBES
    wait_for_previous(PDL)
    number = tl.load(lists + pair)
    word = tl.arange(0, WP)
    words += t.to(tl.int64) * (2 * WP + 1)
    low = tl.load(words + word)
    high = tl.load(words + WP + word)
    constant = tl.load(words + 2 * WP)
    start = tl.load(begin + number)
    size = tl.load(begin + number + 1) - start
    nearest = scan_list(low, high, constant, codes, norms, start, size, R * BITS // 32, BITS, WP,
                        ASM, False)  # fmt: skip
    slots = found + pair.to(tl.int64) * KP + tl.arange(0, KP)
    tl.store(slots, widen(smallest(nearest, KP), start))
    if MIX:
        if pair == 0:
            tl.atomic_add(counts, 1, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(arrived + t, 1, sem="acq_rel") == PROBES - 1:
            own, proposal = load_own_logits(logits, value_centre, t, N, NP)
            early += t.to(tl.int64) * (1 + NP)
            query_dropped = tl.load(early)
            chosen = tl.load(early + 1 + tl.arange(0, NP)) > 0
            slot = tl.arange(0, FOUND)
            seen = tl.load(found + t.to(tl.int64) * PROBES * KP + slot, mask=slot < PROBES * KP,
                           other=NOT_FOUND, cache_modifier=".cg")  # fmt: skip
            mix(t, seen, query_dropped, chosen, own, proposal, dropped, constants, value_codes,
                value_steps, mixed, confidence, counts, real, N, K, KP, VALUE_BITS, COSINE, TOP,
                MASKED, NP)  # fmt: skip
