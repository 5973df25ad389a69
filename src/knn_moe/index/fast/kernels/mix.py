"""Parts of the mixing that kernels share, and the kernels that end a search of many queries."""

from __future__ import annotations

import triton
import triton.language as tl

from knn_moe.index.fast.kernels.scan import NOT_FOUND, least

LOWEST = tl.constexpr(-3.4028234663852886e38)
UNITS = tl.constexpr(4294967296.0)  # of a confidence, to sum whole numbers


@triton.jit
def norm(inputs, centre, step, D, DP: tl.constexpr):
    """‖x - c‖² in grid units."""
    column = tl.arange(0, DP)
    x = tl.load(inputs + column, mask=column < D, other=0.0).to(tl.float32)
    x = (x - tl.load(centre + column, mask=column < D, other=0.0)) / step
    return tl.sum(x * x)


@triton.jit
def query_dropped(square, projected):
    """‖x⊥‖² of a query in grid units, as Grid.dropped, from ‖x - c‖² and its coordinates."""
    edge = tl.maximum(tl.abs(projected) - 127.0, 0.0)
    return tl.maximum(square - tl.sum(projected * projected), 0.0) + tl.sum(edge * edge)


@triton.jit
def coordinates(projected, shift, R: tl.constexpr, RP: tl.constexpr):
    """Of a query on the grid, not yet whole. Result [RP]."""
    dim = tl.arange(0, RP)
    exact = tl.load(projected + dim, mask=dim < R, other=0.0)
    return exact - tl.load(shift + dim, mask=dim < R, other=0.0)


@triton.jit
def distance(best, place, query, dropped, constants):
    """Squared distances of the winners, as grid.Correction."""
    step = tl.load(constants)
    key = tl.load(dropped + place).to(tl.float32)
    estimate = (best >> 32).to(tl.float32)
    projected = estimate - tl.load(constants + 4) * key * key
    error = tl.load(constants + 1) * 2 * tl.sqrt(query) * key
    error += tl.load(constants + 2) * projected + tl.load(constants + 3)
    grid = tl.maximum(projected + key * key + query - error, 0.0)
    return tl.where(best != NOT_FOUND, grid * step * step, float("inf"))


@triton.jit
def top_experts(logits, t, N: tl.constexpr, NP: tl.constexpr, TOP: tl.constexpr):
    """Whether each expert is among the TOP by a router's own logits. Result [NP] bool."""
    expert = tl.arange(0, NP)
    own = tl.load(logits + t.to(tl.int64) * N + expert, mask=expert < N, other=float("-inf"))
    logits = own.to(tl.float32)
    better = (logits[None, :] > logits[:, None]) | (
        (logits[None, :] == logits[:, None]) & (expert[None, :] < expert[:, None])
    )
    return tl.sum(better.to(tl.int32), axis=1) < TOP


@triton.jit
def own_logits(logits, value_centre, t, N: tl.constexpr, NP: tl.constexpr):
    """A router's own, and what a proposal begins with: what `mix` needs of neither neighbour nor
    query. Result [NP] twice."""
    expert = tl.arange(0, NP)
    own = tl.load(logits + t.to(tl.int64) * N + expert, mask=expert < N, other=0.0)
    return own.to(tl.float32), tl.load(value_centre + expert, mask=expert < N, other=0.0)


@triton.jit
def mix(t, found, query, chosen, own, proposal, dropped, constants, value_codes, value_steps,
        mixed, confidence, counts, real, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
        VALUE_BITS: tl.constexpr, COSINE: tl.constexpr, TOP: tl.constexpr, MASKED: tl.constexpr,
        NP: tl.constexpr):  # fmt: skip
    """§4.2 for one query: merge its lists' findings, similarities, proposal, confidence, mixing.

    Then count it, unless it is padding (MASKED, and not real): see hooks.Counts.
    """
    expert = tl.arange(0, NP)
    there = expert < N
    best = least(found, KP)
    place = tl.where(best != NOT_FOUND, best & 0xFFFFFFFF, 0)
    WIDTH: tl.constexpr = (N + 1) // 2 if VALUE_BITS == 4 else N
    where = place[:, None] * WIDTH + (expert % WIDTH)[None, :]
    code = tl.load(value_codes + where, mask=there[None, :], other=0).to(tl.int32)
    value_step = tl.load(value_steps + place).to(tl.float32)
    squared = distance(best, place, query, dropped, constants)
    if COSINE:
        log_similarity = tl.log(tl.minimum(tl.maximum(1 - squared / 2, 0.0), 1.0))
        nearness = log_similarity
    else:
        log_similarity = -tl.load(constants + 5) * squared
        nearness = -tl.load(constants + 6) * squared
    asked = tl.arange(0, KP) < K
    nearness = tl.where(asked, nearness, float("-inf"))
    confidence_factor = tl.load(constants + 7) * tl.minimum(tl.sum(tl.exp(nearness)) / K, 1.0)
    kept = tl.where(asked, tl.maximum(log_similarity, LOWEST), float("-inf"))
    weight = tl.exp(kept - tl.max(kept, axis=0))
    weight = weight / tl.sum(weight)
    if VALUE_BITS == 4:
        code = ((code >> (4 * (expert // WIDTH))[None, :]) & 15) - 8
    proposal += tl.sum(code.to(tl.float32) * (weight * value_step)[:, None], axis=0)
    result = ((1 - confidence_factor) * own + confidence_factor * proposal).to(
        mixed.dtype.element_ty
    )
    tl.store(mixed + t.to(tl.int64) * N + expert, result, mask=there)
    tl.store(confidence + t, confidence_factor)
    if MASKED:
        counted = tl.load(real + t).to(tl.int64)
    else:
        counted = tl.full([], 1, dtype=tl.int64)
    tl.atomic_add(counts + 1, counted, sem="relaxed")
    tl.atomic_add(counts + 3, (confidence_factor * UNITS).to(tl.int64) * counted, sem="relaxed")
    if TOP > 0:
        # Something changed if the best of those left out is now above the worst of the chosen.
        wide = result.to(tl.float32)
        worst = tl.min(tl.where(chosen & there, wide, float("inf")))
        best_other = tl.max(tl.where(there & (chosen == 0), wide, float("-inf")))
        moved = (best_other > worst).to(tl.int64) * counted
        tl.atomic_add(counts + 2, moved, sem="relaxed")


@triton.jit
def finish(inputs, logits, counts, real, mixed, confidence, projected, shift, dropped, centre,
           constants, value_codes, value_steps, value_centre, found, D, stride, call,
           R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
           PROBES: tl.constexpr, VALUE_BITS: tl.constexpr, COSINE: tl.constexpr,
           TOP: tl.constexpr, MASKED: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr,
           NP: tl.constexpr, FOUND: tl.constexpr):  # fmt: skip
    """Merge what a query's lists found, weigh, mix, count. Grid (T,).

    Shapes: found [T, PROBES, KP]; counts [4] and real [T]: see `mix`. `call`: 1 for the first part
    of a call, 0 for the others.
    """
    t = tl.program_id(0)
    if t == 0:
        tl.atomic_add(counts, call, sem="relaxed")
    projected += t.to(tl.int64) * stride
    every = tl.arange(0, FOUND)
    seen = tl.load(found + t.to(tl.int64) * PROBES * KP + every, mask=every < PROBES * KP,
                   other=NOT_FOUND)  # fmt: skip
    own, proposal = own_logits(logits, value_centre, t, N, NP)
    square = norm(inputs + t.to(tl.int64) * D, centre, tl.load(constants), D, DP)
    query = query_dropped(square, coordinates(projected, shift, R, RP))
    chosen = tl.zeros([NP], dtype=tl.int1)
    if TOP > 0:
        chosen = top_experts(logits, t, N, NP, TOP)
    mix(t, seen, query, chosen, own, proposal, dropped, constants, value_codes, value_steps, mixed,
        confidence, counts, real, N, K, KP, VALUE_BITS, COSINE, TOP, MASKED, NP)  # fmt: skip


@triton.jit
def merge(inputs, projected, shift, dropped, centre, constants, found, distances, places, D,
          stride, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PROBES: tl.constexpr,
          DP: tl.constexpr, RP: tl.constexpr, FOUND: tl.constexpr):  # fmt: skip
    """Merge what a query's lists found, for a search without mixing. Grid (T,)."""
    t = tl.program_id(0)
    projected += t.to(tl.int64) * stride
    found += t.to(tl.int64) * PROBES * KP
    every = tl.arange(0, FOUND)
    best = least(tl.load(found + every, mask=every < PROBES * KP, other=NOT_FOUND), KP)
    place = tl.where(best != NOT_FOUND, best & 0xFFFFFFFF, 0)
    square = norm(inputs + t.to(tl.int64) * D, centre, tl.load(constants), D, DP)
    query = query_dropped(square, coordinates(projected, shift, R, RP))
    neighbour = tl.arange(0, KP)
    at = t.to(tl.int64) * K + neighbour
    tl.store(distances + at, distance(best, place, query, dropped, constants), mask=neighbour < K)
    tl.store(places + at, place, mask=neighbour < K)
