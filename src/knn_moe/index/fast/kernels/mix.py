"""Weighing and mixing (§4.2) as the kernels share it, and the kernels that end a prefill's search.

`mix_found` ends a recall of more than 256 queries, `merge_found` a search without mixing for any
number of them. Tested against Correction.apply, PackedValues.at and mix_logits
(tests/index/test_fast_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from knn_moe.index.fast.kernels.scan import NOT_FOUND, smallest

LOWEST = tl.constexpr(-3.4028234663852886e38)
UNITS = tl.constexpr(4294967296.0)  # λ is summed in whole numbers of 1 / UNITS


@triton.jit
def centred_norm(inputs, centre, step, D, DP: tl.constexpr):
    """Return ‖x - c‖² in grid units."""
    column = tl.arange(0, DP)
    x = tl.load(inputs + column, mask=column < D, other=0.0).to(tl.float32)
    x = (x - tl.load(centre + column, mask=column < D, other=0.0)) / step
    return tl.sum(x * x)


@triton.jit
def dropped_norm(square, projected):
    """Return ‖x⊥‖² of a query in grid units, as Grid.dropped, from ‖x - c‖² and coordinates."""
    edge = tl.maximum(tl.abs(projected) - 127.0, 0.0)
    return tl.maximum(square - tl.sum(projected * projected), 0.0) + tl.sum(edge * edge)


@triton.jit
def load_coordinates(projected, shift, R: tl.constexpr, RP: tl.constexpr):
    """Return a query's coordinates on the grid, not yet rounded. Result [RP]."""
    dim = tl.arange(0, RP)
    exact = tl.load(projected + dim, mask=dim < R, other=0.0)
    return exact - tl.load(shift + dim, mask=dim < R, other=0.0)


@triton.jit
def corrected_distance(best, place, query_dropped, dropped, constants):
    """Return the squared distances of the keys found, as Correction.apply does."""
    step = tl.load(constants)
    key = tl.load(dropped + place).to(tl.float32)
    estimate = (best >> 32).to(tl.float32)
    projected = estimate - tl.load(constants + 4) * key * key
    error = tl.load(constants + 1) * 2 * tl.sqrt(query_dropped) * key
    error += tl.load(constants + 2) * projected + tl.load(constants + 3)
    grid = tl.maximum(projected + key * key + query_dropped - error, 0.0)
    return tl.where(best != NOT_FOUND, grid * step * step, float("inf"))


@triton.jit
def is_top_expert(logits, t, N: tl.constexpr, NP: tl.constexpr, TOP: tl.constexpr):
    """Return which experts are among the TOP by the router's own logits. Result [NP] bool."""
    expert = tl.arange(0, NP)
    own = tl.load(logits + t.to(tl.int64) * N + expert, mask=expert < N, other=float("-inf"))
    logits = own.to(tl.float32)
    better = (logits[None, :] > logits[:, None]) | (
        (logits[None, :] == logits[:, None]) & (expert[None, :] < expert[:, None])
    )
    return tl.sum(better.to(tl.int32), axis=1) < TOP


@triton.jit
def choice_changed(chosen, there, result):
    """Return 1 if the best expert left out is now above the worst one chosen, else 0."""
    wide = result.to(tl.float32)
    worst = tl.min(tl.where(chosen & there, wide, float("inf")))
    best_other = tl.max(tl.where(there & (chosen == 0), wide, float("-inf")))
    return (best_other > worst).to(tl.int64)


@triton.jit
def confidence_units(share):
    """Return λ as it is summed: a whole number of 1 / UNITS."""
    return (share * UNITS).to(tl.int64)


@triton.jit
def load_own_logits(logits, value_centre, t, N: tl.constexpr, NP: tl.constexpr):
    """Return the router's own logits, and the mean value, which a proposal starts from. Result
    [NP] twice."""
    expert = tl.arange(0, NP)
    own = tl.load(logits + t.to(tl.int64) * N + expert, mask=expert < N, other=0.0)
    return own.to(tl.float32), tl.load(value_centre + expert, mask=expert < N, other=0.0)


@triton.jit
def mix(t, found, query_dropped, chosen, own, proposal, dropped, constants, value_codes,
        value_steps, mixed, confidence, counts, real, N: tl.constexpr, K: tl.constexpr,
        KP: tl.constexpr, VALUE_BITS: tl.constexpr, COSINE: tl.constexpr, TOP: tl.constexpr,
        MASKED: tl.constexpr, NP: tl.constexpr):  # fmt: skip
    """Merge what one query's lists found, weigh, propose, mix (§4.2).

    Then count it, unless it is padding (MASKED, and not real). counts [4]: calls, tokens, tokens
    whose experts changed, sum of λ · UNITS.
    """
    expert = tl.arange(0, NP)
    there = expert < N
    best = smallest(found, KP)
    place = tl.where(best != NOT_FOUND, best & 0xFFFFFFFF, 0)
    WIDTH: tl.constexpr = (N + 1) // 2 if VALUE_BITS == 4 else N
    where = place[:, None] * WIDTH + (expert % WIDTH)[None, :]
    code = tl.load(value_codes + where, mask=there[None, :], other=0).to(tl.int32)
    value_step = tl.load(value_steps + place).to(tl.float32)
    squared = corrected_distance(best, place, query_dropped, dropped, constants)
    if COSINE:
        log_similarity = tl.log(tl.minimum(tl.maximum(1 - squared / 2, 0.0), 1.0))
        nearness = log_similarity
    else:
        log_similarity = -tl.load(constants + 5) * squared
        nearness = -tl.load(constants + 6) * squared
    wanted = tl.arange(0, KP) < K
    nearness = tl.where(wanted, nearness, float("-inf"))
    share = tl.load(constants + 7) * tl.minimum(tl.sum(tl.exp(nearness)) / K, 1.0)
    kept = tl.where(wanted, tl.maximum(log_similarity, LOWEST), float("-inf"))
    weight = tl.exp(kept - tl.max(kept, axis=0))
    weight = weight / tl.sum(weight)
    if VALUE_BITS == 4:
        code = ((code >> (4 * (expert // WIDTH))[None, :]) & 15) - 8
    proposal += tl.sum(code.to(tl.float32) * (weight * value_step)[:, None], axis=0)
    result = ((1 - share) * own + share * proposal).to(mixed.dtype.element_ty)
    tl.store(mixed + t.to(tl.int64) * N + expert, result, mask=there)
    tl.store(confidence + t, share)
    if MASKED:
        counted = tl.load(real + t).to(tl.int64)
    else:
        counted = tl.full([], 1, dtype=tl.int64)
    tl.atomic_add(counts + 1, counted, sem="relaxed")
    tl.atomic_add(counts + 3, confidence_units(share) * counted, sem="relaxed")
    if TOP > 0:
        moved = choice_changed(chosen, there, result) * counted
        tl.atomic_add(counts + 2, moved, sem="relaxed")


@triton.jit
def mix_found(inputs, logits, counts, real, mixed, confidence, projected, shift, dropped, centre,
              constants, value_codes, value_steps, value_centre, found, D, stride, call,
              R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
              PROBES: tl.constexpr, VALUE_BITS: tl.constexpr, COSINE: tl.constexpr,
              TOP: tl.constexpr, MASKED: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr,
              NP: tl.constexpr, FOUND: tl.constexpr):  # fmt: skip
    """Merge what a query's lists found, weigh, mix, count. Grid (T,).

    Shapes: found [T, PROBES, KP]; counts [4] and real [T]: see `mix`. `call` is 1 for the first
    part of a call, 0 for the others.
    """
    t = tl.program_id(0)
    if t == 0:
        tl.atomic_add(counts, call, sem="relaxed")
    projected += t.to(tl.int64) * stride
    every = tl.arange(0, FOUND)
    seen = tl.load(found + t.to(tl.int64) * PROBES * KP + every, mask=every < PROBES * KP,
                   other=NOT_FOUND)  # fmt: skip
    own, proposal = load_own_logits(logits, value_centre, t, N, NP)
    square = centred_norm(inputs + t.to(tl.int64) * D, centre, tl.load(constants), D, DP)
    query_dropped = dropped_norm(square, load_coordinates(projected, shift, R, RP))
    chosen = tl.zeros([NP], dtype=tl.int1)
    if TOP > 0:
        chosen = is_top_expert(logits, t, N, NP, TOP)
    mix(t, seen, query_dropped, chosen, own, proposal, dropped, constants, value_codes, value_steps,
        mixed, confidence, counts, real, N, K, KP, VALUE_BITS, COSINE, TOP, MASKED, NP)  # fmt: skip


@triton.jit
def merge_found(inputs, projected, shift, dropped, centre, constants, found, distances, places, D,
                stride, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PROBES: tl.constexpr,
                DP: tl.constexpr, RP: tl.constexpr, FOUND: tl.constexpr):  # fmt: skip
    """Merge what a query's lists found, for a search without mixing. Grid (T,)."""
    t = tl.program_id(0)
    projected += t.to(tl.int64) * stride
    found += t.to(tl.int64) * PROBES * KP
    every = tl.arange(0, FOUND)
    best = smallest(tl.load(found + every, mask=every < PROBES * KP, other=NOT_FOUND), KP)
    place = tl.where(best != NOT_FOUND, best & 0xFFFFFFFF, 0)
    square = centred_norm(inputs + t.to(tl.int64) * D, centre, tl.load(constants), D, DP)
    query_dropped = dropped_norm(square, load_coordinates(projected, shift, R, RP))
    neighbour = tl.arange(0, KP)
    at = t.to(tl.int64) * K + neighbour
    tl.store(
        distances + at,
        corrected_distance(best, place, query_dropped, dropped, constants),
        mask=neighbour < K,
    )
    tl.store(places + at, place, mask=neighbour < K)
