"""The search of `fast` and the mixing, as Triton kernels. The one file that imports triton.

The same whole numbers as scan.py, then the arithmetic of grid.py, similarity.py and mixing.py. No
score reaches memory but each list's best few.

A few queries (decoding): `project`, then `few`. Each program of `few` has some lists and one query:
it finds out which of its lists are among the nearest and scans them; the last of a query's programs
to arrive merges, weighs and mixes. What that takes is the latency of one chain of loads, so
whatever waits for nobody is loaded first, and one more program does what need not wait for the
lists.

Some queries (decoding in batches): `choose` finds each query's nearest lists, `scan_pairs` scans
one of them, `finish` merges, weighs and mixes.

Many queries (prefill): `choose` lets each query join the queues of its nearest lists, `scan_queues`
takes a list at a time for the queries in its queue, on the matrix units; then `finish`.

Shapes: T queries, L lists, M keys, r dims, N experts, K neighbours. Names in capitals are known
when a kernel is compiled; KP, NP, … are the next powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOT_FOUND = tl.constexpr(2**63 - 1)
NOWHERE = tl.constexpr(2**31 - 1)  # not found, within a list
FARTHEST = tl.constexpr((1 << 22) - 2)
LONGEST = tl.constexpr(512)  # keys of a list
BINS = tl.constexpr(128)  # of the keys of a list 128 places apart, only the nearest is kept
LOWEST = tl.constexpr(-3.4028234663852886e38)
FAR = tl.constexpr(3e38)
UNITS = tl.constexpr(4294967296.0)  # of a confidence, to sum whole numbers
ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it and taking it off rounds half to even


@triton.jit
def _whole(projected):
    """The nearest grid point, as grid.to_whole."""
    inside = tl.minimum(tl.maximum(projected, -127.0), 127.0)
    return (inside + ROUNDER) - ROUNDER


@triton.jit
def _point(projected, shift, at, inside):
    """Coordinates of a query on the grid, 0 where not inside."""
    taken_off = tl.load(shift + at, mask=inside, other=0.0)
    return _whole(tl.load(projected + at, mask=inside, other=0.0) - taken_off)


@triton.jit
def _known(distance):
    """No NaN: a query that is not a number must still be told PROBES lists, of its own."""
    return tl.where(distance == distance, distance, FAR)


@triton.jit
def _least(numbers, KP: tl.constexpr):
    """The KP least of a vector, ascending."""
    if KP == 1:
        least = tl.min(numbers, axis=0, keep_dims=True)
    else:
        least = -tl.topk(-numbers, KP)
    return least


@triton.jit
def _packed(constant, norm, dots, position, inside, BITS: tl.constexpr):
    """estimate · 512 + position in the list, from q·code (grid.from_codes is in `constant`)."""
    if BITS == 4:
        dots = dots * 16
    estimate = tl.minimum(tl.maximum(constant + norm - 2 * dots, 0), FARTHEST)
    return tl.where(inside, estimate * LONGEST + position, NOWHERE)


@triton.jit
def _widen(found, start):
    """From estimate · 512 + position in a list to estimate · 2³² + place."""
    wide = ((found // LONGEST).to(tl.int64) << 32) + start + found % LONGEST
    return tl.where(found == NOWHERE, NOT_FOUND, wide)


@triton.jit
def _query_words(projected, shift, word, there, BITS: tl.constexpr):
    """Four coordinates of a query to a word, and what they add to the constant of `_packed`."""
    words = tl.zeros_like(word)
    energy = tl.zeros_like(word)
    for byte in tl.static_range(4):
        point = _point(projected, shift, 4 * word + byte, there).to(tl.int32)
        words |= (point & 255) << (8 * byte)
        energy += point * point
        if BITS == 4:
            # A code n stands for 16n - 120, n from 0 to 15.
            energy += 240 * point
    return words, energy


@triton.jit
def _dot4(codes, query, total, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """total + the sum of four products: bytes of `codes` with signed bytes of `query`."""
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
def _scan_part(low, high, constant, codes, norms, start, size, word, first, WORDS: tl.constexpr,
               BITS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """`_packed` of BINS keys of a list, for one query."""
    position = first + tl.arange(0, BINS)
    inside = position < size
    norm = tl.load(norms + start + position, mask=inside, other=0)
    at = (start + position).to(tl.int64)[:, None] * WORDS + word[None, :]
    code = tl.load(codes + at, mask=inside[:, None] & (word < WORDS)[None, :], other=0)
    low = tl.broadcast_to(low[None, :], code.shape)
    high = tl.broadcast_to(high[None, :], code.shape)
    dots = tl.zeros_like(code)
    if BITS == 4:
        dots = _dot4(code & 0x0F0F0F0F, low, dots, False, ASM)
        dots = _dot4((code >> 4) & 0x0F0F0F0F, high, dots, False, ASM)
    else:
        dots = _dot4(code, low, dots, True, ASM)
    return _packed(constant, norm, tl.sum(dots, axis=1), position, inside, BITS)


@triton.jit
def _query(projected, shift, R: tl.constexpr, BITS: tl.constexpr, WP: tl.constexpr):
    """A query as words, for the low and the high halves of codes, and its constant in `_packed`."""
    word = tl.arange(0, WP)
    there = word < R * BITS // 32
    low, energy = _query_words(projected, shift, word, there, BITS)
    high = low
    if BITS == 4:
        high, more = _query_words(projected + R // 2, shift + R // 2, word, there, BITS)
        energy += more
    return low, high, tl.sum(energy)


@triton.jit
def _scan_list(low, high, constant, codes, norms, start, size, WORDS: tl.constexpr,
               BITS: tl.constexpr, WP: tl.constexpr, ASM: tl.constexpr,
               AT_ONCE: tl.constexpr):  # fmt: skip
    """The nearest of each bin of a list, `_packed`, for one query. Codes are read as words.

    AT_ONCE: all loads in flight together, for the least delay; otherwise one after the other, in
    fewer registers, for the most programs at a time.
    """
    word = tl.arange(0, WP)
    nearest = tl.full([BINS], NOWHERE, dtype=tl.int32)
    if AT_ONCE:
        for first in tl.static_range(0, LONGEST, BINS):
            part = _scan_part(low, high, constant, codes, norms, start, size, word, first, WORDS,
                              BITS, ASM)  # fmt: skip
            nearest = tl.minimum(nearest, part)
    else:
        for first in range(0, size, BINS):
            part = _scan_part(low, high, constant, codes, norms, start, size, word, first, WORDS,
                              BITS, ASM)  # fmt: skip
            nearest = tl.minimum(nearest, part)
    return nearest


@triton.jit
def _square(inputs, centre, step, D, DP: tl.constexpr):
    """‖x - c‖² in grid units."""
    column = tl.arange(0, DP)
    x = tl.load(inputs + column, mask=column < D, other=0.0).to(tl.float32)
    x = (x - tl.load(centre + column, mask=column < D, other=0.0)) / step
    return tl.sum(x * x)


@triton.jit
def _dropped(square, projected, shift, R: tl.constexpr, RP: tl.constexpr):
    """‖x⊥‖² of a query in grid units, as Grid.dropped."""
    dim = tl.arange(0, RP)
    p = tl.load(projected + dim, mask=dim < R, other=0.0)
    p -= tl.load(shift + dim, mask=dim < R, other=0.0)
    edge = tl.maximum(tl.abs(p) - 127.0, 0.0)
    return tl.maximum(square - tl.sum(p * p), 0.0) + tl.sum(edge * edge)


@triton.jit
def _distance(best, place, query, dropped, constants):
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
def _chosen(logits, t, N: tl.constexpr, NP: tl.constexpr, TOP: tl.constexpr):
    """Whether each expert is among the TOP by a router's own logits. Result [NP] bool."""
    expert = tl.arange(0, NP)
    own = tl.load(logits + t.to(tl.int64) * N + expert, mask=expert < N, other=float("-inf"))
    logits = own.to(tl.float32)
    better = (logits[None, :] > logits[:, None]) | (
        (logits[None, :] == logits[:, None]) & (expert[None, :] < expert[:, None])
    )
    return tl.sum(better.to(tl.int32), axis=1) < TOP


@triton.jit
def _mix(t, query, chosen, logits, dropped, constants, value_codes, value_steps, value_centre,
         found, mixed, confidence, counts, real, N: tl.constexpr, K: tl.constexpr,
         KP: tl.constexpr, VALUE_BITS: tl.constexpr, COSINE: tl.constexpr, TOP: tl.constexpr,
         MASKED: tl.constexpr, NP: tl.constexpr, COUNT: tl.constexpr,
         FOUND: tl.constexpr):  # fmt: skip
    """§4.2 for one query: merge its lists' findings, similarities, proposal, confidence, mixing.

    Then count it, unless it is padding (MASKED, and not real): see hooks.Counts.
    """
    expert = tl.arange(0, NP)
    there = expert < N
    at = t.to(tl.int64) * N + expert
    own = tl.load(logits + at, mask=there, other=0.0).to(tl.float32)
    proposal = tl.load(value_centre + expert, mask=there, other=0.0)
    every = tl.arange(0, FOUND)
    all_found = tl.load(found + every, mask=every < COUNT, other=NOT_FOUND, cache_modifier=".cg")
    best = _least(all_found, KP)
    place = tl.where(best != NOT_FOUND, best & 0xFFFFFFFF, 0)
    WIDTH: tl.constexpr = (N + 1) // 2 if VALUE_BITS == 4 else N
    where = place[:, None] * WIDTH + (expert % WIDTH)[None, :]
    code = tl.load(value_codes + where, mask=there[None, :], other=0).to(tl.int32)
    value_step = tl.load(value_steps + place).to(tl.float32)
    distance = _distance(best, place, query, dropped, constants)
    if COSINE:
        log_similarity = tl.log(tl.minimum(tl.maximum(1 - distance / 2, 0.0), 1.0))
    else:
        log_similarity = -tl.load(constants + 5) * distance
    asked = tl.arange(0, KP) < K
    log_similarity = tl.where(asked, log_similarity, float("-inf"))
    trust = tl.minimum(tl.sum(tl.exp(log_similarity)) / K, 1.0)
    kept = tl.where(asked, tl.maximum(log_similarity, LOWEST), float("-inf"))
    weight = tl.exp(kept - tl.max(kept, axis=0))
    weight = weight / tl.sum(weight)
    if VALUE_BITS == 4:
        code = ((code >> (4 * (expert // WIDTH))[None, :]) & 15) - 8
    proposal += tl.sum(code.to(tl.float32) * (weight * value_step)[:, None], axis=0)
    result = ((1 - trust) * own + trust * proposal).to(mixed.dtype.element_ty)
    tl.store(mixed + at, result, mask=there)
    tl.store(confidence + t, trust)
    if MASKED:
        counted = tl.load(real + t).to(tl.int64)
    else:
        counted = tl.full([], 1, dtype=tl.int64)
    tl.atomic_add(counts + 1, counted, sem="relaxed")
    tl.atomic_add(counts + 3, (trust * UNITS).to(tl.int64) * counted, sem="relaxed")
    if TOP > 0:
        # Something changed if the best of those left out is now above the worst of the chosen.
        wide = result.to(tl.float32)
        worst = tl.min(tl.where(chosen & there, wide, float("inf")))
        best_other = tl.max(tl.where(there & (chosen == 0), wide, float("-inf")))
        moved = (best_other > worst).to(tl.int64) * counted
        tl.atomic_add(counts + 2, moved, sem="relaxed")


@triton.jit
def project(inputs, stacked, centre, constants, projected, D, RL, stride, ROWS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """x times the stacked rows, and ‖x - c‖² in grid units. Grid (⌈RL / ROWS⌉ + 1, T).

    Shapes: inputs [T, D]; stacked [RL, D]; projected [T, stride], RL + 1 of which are written.
    """
    t = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    column = tl.arange(0, BLOCK)
    inputs += t * D
    projected += t * stride
    if first < RL:
        row = first + tl.arange(0, ROWS)
        total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for start in range(0, D, BLOCK):
            inside = start + column < D
            x = tl.load(inputs + start + column, mask=inside, other=0.0).to(tl.float32)
            at = row.to(tl.int64)[:, None] * D + (start + column)[None, :]
            weight = tl.load(stacked + at, mask=(row < RL)[:, None] & inside[None, :], other=0.0)
            total += weight.to(tl.float32) * x[None, :]
        tl.store(projected + row, tl.sum(total, axis=1), mask=row < RL)
    else:
        norm = tl.zeros([BLOCK], dtype=tl.float32)
        step = tl.load(constants)
        for start in range(0, D, BLOCK):
            inside = start + column < D
            x = tl.load(inputs + start + column, mask=inside, other=0.0).to(tl.float32)
            x = (x - tl.load(centre + start + column, mask=inside, other=0.0)) / step
            norm += x * x
        tl.store(projected + RL, tl.sum(norm))


@triton.jit
def few(logits, counts, real, mixed, confidence, projected, shift, begin, codes, norms, dropped,
        constants, value_codes, value_steps, value_centre, found, arrived, L, stride,
        R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PROBES: tl.constexpr,
        BITS: tl.constexpr, VALUE_BITS: tl.constexpr, COSINE: tl.constexpr, TOP: tl.constexpr,
        MASKED: tl.constexpr, LP: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr,
        WP: tl.constexpr, FOUND: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Some lists for one query; the query's last program finishes. Grid (programs + 1, T).

    Shapes: projected [T, stride]: projections [r], coarse distances [L], ‖x - c‖², and room for
    what the one more program finds [1 + NP]; found [T, PROBES, KP]; arrived [T], 0 before and
    after; counts [4] and real [T]: see `_mix`.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0) - 1
    t = tl.program_id(1)
    projected += t.to(tl.int64) * stride
    found += t * PROBES * KP
    early = projected + R + L + 1
    last = False
    if program == programs:
        square = tl.load(projected + R + L)
        tl.store(early, _dropped(square, projected, shift, R, RP))
        if t == 0:
            tl.atomic_add(counts, 1, sem="relaxed")
        if TOP > 0:
            chosen = _chosen(logits, t, N, NP, TOP)
            tl.store(early + 1 + tl.arange(0, NP), chosen.to(tl.float32))
        tl.debug_barrier()
        last = tl.atomic_add(arrived + t, 1, sem="acq_rel") == PROBES
    else:
        low, high, constant = _query(projected, shift, R, BITS, WP)
        other = tl.arange(0, LP)
        coarse = tl.load(projected + R + other, mask=other < L, other=float("inf"))
        coarse = _known(coarse - tl.load(shift + R + other, mask=other < L, other=0.0))
        for number in range(program, L, programs):
            start = tl.load(begin + number)
            size = tl.load(begin + number + 1) - start
            mine = _known(tl.load(projected + R + number) - tl.load(shift + R + number))
            nearer = (coarse < mine) | ((coarse == mine) & (other < number))
            rank = tl.sum(nearer.to(tl.int32))
            if rank < PROBES:
                nearest = _scan_list(low, high, constant, codes, norms, start, size,
                                     R * BITS // 32, BITS, WP, ASM, True)  # fmt: skip
                best = _widen(_least(nearest, KP), start)
                tl.store(found + rank * KP + tl.arange(0, KP), best)
                tl.debug_barrier()
                last = tl.atomic_add(arrived + t, 1, sem="acq_rel") == PROBES
    if last:
        tl.store(arrived + t, 0)
        query = tl.load(early, cache_modifier=".cg")
        chosen = tl.load(early + 1 + tl.arange(0, NP), cache_modifier=".cg") > 0
        _mix(t, query, chosen, logits, dropped, constants, value_codes, value_steps, value_centre,
             found, mixed, confidence, counts, real, N, K, KP, VALUE_BITS, COSINE, TOP, MASKED, NP,
             PROBES * KP, FOUND)  # fmt: skip


@triton.jit
def round_queries(projected, shift, whole, size, R: tl.constexpr, BLOCK: tl.constexpr):
    """Grid points of projected queries. Shapes: projected, whole [T, r]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    point = tl.load(projected + at, mask=inside, other=0.0)
    point -= tl.load(shift + at % R, mask=inside, other=0.0)
    tl.store(whole + at, _whole(point).to(whole.dtype.element_ty), mask=inside)


@triton.jit
def choose(coarse, shift, scale, lists, queues, lengths, T, L, stride, PROBES: tl.constexpr,
           PP: tl.constexpr, LP: tl.constexpr, QUEUE: tl.constexpr):  # fmt: skip
    """A query's nearest lists, by scale · coarse - shift; QUEUE: it joins their queues. Grid (T,).

    Shapes: coarse [T, stride]; shift [L]; lists [T, PROBES]; queues [L, T], of query · PROBES +
    probe; lengths [L], 0 before.
    """
    t = tl.program_id(0)
    number = tl.arange(0, LP)
    there = number < L
    distance = scale * tl.load(coarse + t.to(tl.int64) * stride + number, mask=there, other=0.0)
    distance = _known(distance - tl.load(shift + number, mask=there, other=0.0))
    distance = tl.where(there, distance, float("inf"))
    probe = tl.arange(0, PP)
    nearest = tl.zeros([PP], dtype=tl.int32)
    for turn in range(PROBES):
        least = tl.min(distance, axis=0)
        at = tl.min(tl.where(distance == least, number, LP), axis=0)
        nearest = tl.where(probe == turn, at, nearest)
        distance = tl.where(number == at, float("inf"), distance)
    wanted = probe < PROBES
    if QUEUE:
        turns = tl.atomic_add(lengths + nearest, 1, mask=wanted, sem="relaxed")
        tl.store(queues + nearest.to(tl.int64) * T + turns, t * PROBES + probe, mask=wanted)
    else:
        tl.store(lists + t * PROBES + probe, nearest, mask=wanted)


@triton.jit
def scan_pairs(projected, shift, codes, norms, begin, lists, found, stride, R: tl.constexpr,
               BITS: tl.constexpr, K: tl.constexpr, PROBES: tl.constexpr, WP: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """A list for one query. Grid (T · PROBES,). Shapes: found [T, PROBES, K] int64."""
    pair = tl.program_id(0)
    number = tl.load(lists + pair)
    start = tl.load(begin + number)
    size = tl.load(begin + number + 1) - start
    projected += (pair // PROBES).to(tl.int64) * stride
    low, high, constant = _query(projected, shift, R, BITS, WP)
    nearest = _scan_list(low, high, constant, codes, norms, start, size, R * BITS // 32, BITS, WP,
                         ASM, False)  # fmt: skip
    found += pair.to(tl.int64) * K
    for neighbour in range(K):
        least = tl.min(nearest, axis=0)
        tl.store(found + neighbour, _widen(least, start))
        nearest = tl.where(nearest == least, NOWHERE, nearest)


@triton.jit
def scan_queues(whole, codes, norms, begin, queues, lengths, found, T, R: tl.constexpr,
                BITS: tl.constexpr, K: tl.constexpr, PROBES: tl.constexpr, QUERIES: tl.constexpr,
                CHUNK: tl.constexpr):  # fmt: skip
    """A list for the queries of its queue, QUERIES at a time. Grid (L, programs of a list).

    CHUNK bytes of a code are multiplied at a time; it divides them.

    Shapes: whole [T, r]; found [T, PROBES, K] int64.
    """
    number = tl.program_id(0)
    length = tl.load(lengths + number)
    start = tl.load(begin + number)
    size = tl.load(begin + number + 1) - start
    byte = tl.arange(0, CHUNK)
    WIDTH: tl.constexpr = R * BITS // 8
    for first in range(tl.program_id(1) * QUERIES, length, tl.num_programs(1) * QUERIES):
        turn = first + tl.arange(0, QUERIES)
        asked = turn < length
        pair = tl.load(queues + number.to(tl.int64) * T + turn, mask=asked, other=0)
        query = whole + (pair // PROBES).to(tl.int64)[:, None] * R + byte[None, :]
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
            packed = _packed(constant[:, None], norm, dots, position[None, :], inside[None, :],
                             BITS)  # fmt: skip
            nearest = tl.minimum(nearest, packed)
        slot = found + pair.to(tl.int64) * K
        for neighbour in range(K):
            least = tl.min(nearest, axis=1)
            tl.store(slot + neighbour, _widen(least, start), mask=asked)
            nearest = tl.where(nearest == least[:, None], NOWHERE, nearest)


@triton.jit
def finish(inputs, logits, counts, real, mixed, confidence, projected, shift, dropped, centre,
           constants, value_codes, value_steps, value_centre, found, D, stride, call,
           R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
           PROBES: tl.constexpr, VALUE_BITS: tl.constexpr, COSINE: tl.constexpr,
           TOP: tl.constexpr, MASKED: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr,
           NP: tl.constexpr, FOUND: tl.constexpr):  # fmt: skip
    """Merge what a query's lists found, weigh, mix, count. Grid (T,).

    Shapes: found [T, PROBES, K]; counts [4] and real [T]: see `_mix`. `call`: 1 for the first part
    of a call, 0 for the others.
    """
    t = tl.program_id(0)
    if t == 0:
        tl.atomic_add(counts, call, sem="relaxed")
    projected += t.to(tl.int64) * stride
    found += t.to(tl.int64) * PROBES * K
    square = _square(inputs + t.to(tl.int64) * D, centre, tl.load(constants), D, DP)
    query = _dropped(square, projected, shift, R, RP)
    chosen = tl.zeros([NP], dtype=tl.int1)
    if TOP > 0:
        chosen = _chosen(logits, t, N, NP, TOP)
    _mix(t, query, chosen, logits, dropped, constants, value_codes, value_steps, value_centre,
         found, mixed, confidence, counts, real, N, K, KP, VALUE_BITS, COSINE, TOP, MASKED, NP,
         PROBES * K, FOUND)  # fmt: skip


@triton.jit
def merge(inputs, projected, shift, dropped, centre, constants, found, distances, places, D,
          stride, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PROBES: tl.constexpr,
          DP: tl.constexpr, RP: tl.constexpr, FOUND: tl.constexpr):  # fmt: skip
    """Merge what a query's lists found, for a search without mixing. Grid (T,)."""
    t = tl.program_id(0)
    projected += t.to(tl.int64) * stride
    found += t.to(tl.int64) * PROBES * K
    every = tl.arange(0, FOUND)
    best = _least(tl.load(found + every, mask=every < PROBES * K, other=NOT_FOUND), KP)
    place = tl.where(best != NOT_FOUND, best & 0xFFFFFFFF, 0)
    square = _square(inputs + t.to(tl.int64) * D, centre, tl.load(constants), D, DP)
    query = _dropped(square, projected, shift, R, RP)
    neighbour = tl.arange(0, KP)
    at = t.to(tl.int64) * K + neighbour
    tl.store(distances + at, _distance(best, place, query, dropped, constants), mask=neighbour < K)
    tl.store(places + at, place, mask=neighbour < K)
