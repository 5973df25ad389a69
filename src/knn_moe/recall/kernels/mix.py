"""Putting the parts of a comparison together: λ, the mixed logits, and the counts of hooks.

Tested against DistilledRecall in plain torch (tests/recall/test_distilled_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from knn_moe.index.fast.kernels.mix import LOWEST, choice_changed, confidence_units, is_top_expert
from knn_moe.index.fast.kernels.scan import wait_for_previous


@triton.jit
def squared_distance(x, centre, factors, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Return ‖x - c‖², with x in the factors' dtype."""
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, D, COLUMNS):
        inside = start + column < D
        own = tl.load(x + start + column, mask=inside, other=0.0)
        own = own.to(factors.dtype.element_ty).to(tl.float32)
        own -= tl.load(centre + start + column, mask=inside, other=0.0)
        total += own * own
    return tl.sum(total)


@triton.jit
def join_parts(place, parts, N: tl.constexpr, SPLITS: tl.constexpr, NP: tl.constexpr,
               SP: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Return the largest log s of all parts, but for the norm; Σ s relative to it; and the update
    Σ s u / Σ s + W x [NP]."""
    expert = tl.arange(0, NP)
    logs = place + (SPLITS + 1) * NP
    part = tl.arange(0, SP)
    of_part = tl.load(logs + part, mask=part < parts, other=float("-inf"))
    most = tl.maximum(tl.max(of_part, axis=0), LOWEST)
    sums = tl.load(logs + SPLITS + part, mask=part < parts, other=0.0)
    total = tl.sum(tl.exp(of_part - most) * sums, axis=0)
    update = tl.zeros([NP], dtype=tl.float32)
    for first in range(0, SP, CHUNK):
        some = first + tl.arange(0, CHUNK)
        there = some < parts
        weight = tl.exp(tl.load(logs + some, mask=there, other=float("-inf")) - most)
        value = tl.load(
            place + some[:, None] * NP + expert[None, :], mask=there[:, None], other=0.0
        )
        update += tl.sum(weight[:, None] * value, axis=0)
    linear = tl.load(place + SPLITS * NP + expert, mask=expert < N, other=0.0)
    return most, total, update / total + linear


@triton.jit
def prototype_share(most, total, distance, widths):
    """Return λ = factor · Σ s / (s_0 + Σ s). No log s is above 0 but by rounding: clamp it."""
    norm = tl.load(widths) * distance
    reach = tl.minimum(most, norm) - norm + tl.log(total) - tl.load(widths + 1)
    small = tl.exp(-tl.abs(reach))
    return tl.load(widths + 2) * tl.where(reach >= 0, 1.0, small) / (1 + small)


@triton.jit
def mix_prototypes(logits, inputs, slots, calls, counts, real, mixed, confidence, scratch, factors,
                   centre, sizes, widths, T, call, S: tl.constexpr, D: tl.constexpr,
                   N: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr,
                   STRIDE: tl.constexpr, TOP: tl.constexpr, MASKED: tl.constexpr, NP: tl.constexpr,
                   SP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr,
                   COLUMNS: tl.constexpr, PER: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Take λ of PER tokens, mix the update into their logits, count. Grid (⌈T / PER⌉,).

    A token that uses no memory keeps its logits. Shapes: logits, mixed [T, N]; slots [T], -1: no
    memory; calls [S], 1 for memories that are used; counts [S, 4]: calls, tokens, tokens whose
    experts changed, sum of λ · UNITS; real [T]; confidence [T]; scratch: see `compare_prototypes`;
    centre [S, D]; widths [S, 4]: γ, log s_0, λ's factor. `call` is 1 for the first part of a call,
    0 for the others.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, NP)
    there = expert < N
    memory = tl.arange(0, MP)
    counted = tl.zeros([MP], dtype=tl.int64)
    moved = tl.zeros([MP], dtype=tl.int64)
    units = tl.zeros([MP], dtype=tl.int64)
    wait_for_previous(PDL)
    if program == 0:
        if SLOTS:
            used = tl.load(calls + memory, mask=memory < S, other=0) * call
            tl.atomic_add(counts + 4 * memory, used, mask=memory < S, sem="relaxed")
        else:
            tl.atomic_add(counts, call, sem="relaxed")
    for turn in range(PER):
        t = (program * PER + turn).to(tl.int64)
        if t < T:
            slot = tl.full([], 0, dtype=tl.int32)
            if SLOTS:
                slot = tl.load(slots + t)
            own = tl.load(logits + t * N + expert, mask=there, other=0.0)
            result = own
            share = tl.full([], 0.0, dtype=tl.float32)
            if slot >= 0:
                place = scratch + t * STRIDE
                parts = tl.cdiv(tl.load(sizes + slot), SPAN)
                distance = squared_distance(
                    inputs + t * D, centre + slot.to(tl.int64) * D, factors, D, COLUMNS
                )
                most, total, update = join_parts(place, parts, N, SPLITS, NP, SP, CHUNK)
                share = prototype_share(most, total, distance, widths + 4 * slot)
                wide = own.to(tl.float32)
                wide = tl.where(share == 0, wide, wide + share * update)
                result = wide.to(own.dtype)
            tl.store(mixed + t * N + expert, result, mask=there)
            tl.store(confidence + t, share)
            tokens = (memory == slot).to(tl.int64)
            if MASKED:
                tokens *= tl.load(real + t).to(tl.int64)
            counted += tokens
            units += confidence_units(tl.where(share >= 0, share, 0.0)) * tokens
            if TOP > 0:
                chosen = is_top_expert(logits, t, N, NP, TOP)
                moved += choice_changed(chosen, there, result) * tokens
    some = counted > 0
    tl.atomic_add(counts + 4 * memory + 1, counted, mask=some, sem="relaxed")
    tl.atomic_add(counts + 4 * memory + 3, units, mask=some, sem="relaxed")
    if TOP > 0:
        tl.atomic_add(counts + 4 * memory + 2, moved, mask=some, sem="relaxed")
