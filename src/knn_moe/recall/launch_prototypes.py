"""Launches the kernels of a distilled layer: in which blocks, in how many programs.

Two launches serve any number of tokens up to _AT_ONCE. What to tune on a GPU is in this file: the
tables of blocks and the numbers below them. Triton compiles a kernel when it is first launched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.index.fast.launcher import KernelLauncher, device_constants
from knn_moe.index.fast.tensors import next_power_of_two
from knn_moe.recall.prototype_tensors import PrototypeTensors


class Blocks(NamedTuple):
    """The blocks that a program of `compare_prototypes` multiplies, and how it is compiled."""

    tokens: int  # 1: without tensor cores
    rows: int  # prototypes
    columns: int  # of an input, at a time
    warps: int
    stages: int


# By the most tokens that they serve, for numbers of 16 bits.
_BLOCKS: Final = (
    (1, Blocks(1, 8, 2048, warps=8, stages=1)),
    (16, Blocks(16, 16, 256, warps=4, stages=3)),
    (32, Blocks(32, 16, 128, warps=4, stages=4)),
    (64, Blocks(64, 16, 128, warps=4, stages=4)),
    (1024, Blocks(64, 64, 64, warps=4, stages=4)),
    (None, Blocks(128, 128, 64, warps=8, stages=3)),
)
# And of 32 bits: each product is made of three.
_WIDE_BLOCKS: Final = (
    (1, Blocks(1, 8, 1024, warps=8, stages=1)),
    (16, Blocks(16, 16, 128, warps=4, stages=3)),
    (32, Blocks(32, 16, 64, warps=4, stages=3)),
    (None, Blocks(64, 32, 32, warps=4, stages=3)),
)
_MOST_UPDATES: Final = 1 << 14  # numbers of a program's own update: they stay in registers
_MOST_VALUES: Final = 1 << 13  # numbers of prototypes' updates that a program holds
_EXPERTS_PER_WARP: Final = 64  # at the most
_PROGRAMS: Final = 264  # that `compare_prototypes` should have: two to a multiprocessor
_FEW: Final = 64  # tokens up to which factors are fetched early and each has a program that mixes
_LINE: Final = 32  # numbers of a factor that one prefetch brings, as in kernels/compare.py
_PER: Final = 4  # otherwise, tokens that one program mixes: their counts are added once
_JOINED: Final = 1 << 13  # numbers of partial updates that are read together
_NORM: Final = 1024  # columns at a time where ‖x - c‖² is computed
_MIX_WARPS: Final = 4
_AT_ONCE: Final = 8192  # tokens served together: bounds the memory of partial updates


class Plan(NamedTuple):
    """How some number of tokens is served: the blocks, and the prototypes of a program."""

    blocks: Blocks
    span: int
    splits: int
    few: bool


@lru_cache(maxsize=1024)
def make_plan(tokens: int, prototypes: int, experts: int, *, wide: bool) -> Plan:
    """Return the plan for a number of tokens, at least 1. `wide`: keys have 32 bits."""
    table = _WIDE_BLOCKS if wide else _BLOCKS
    blocks = next(each for most, each in table if most is None or tokens <= most)
    padded = _pad_experts(experts)
    if blocks.tokens > 1:
        blocks = blocks._replace(
            tokens=max(min(blocks.tokens, _MOST_UPDATES // padded), 16),
            rows=max(min(blocks.rows, _MOST_VALUES // padded), 16),
            warps=max(blocks.warps, padded // _EXPERTS_PER_WARP),
        )
    most = -(-prototypes // blocks.rows)
    wanted = max(_PROGRAMS // -(-tokens // blocks.tokens), 1)
    # A power of two: a kernel is compiled for each.
    span = blocks.rows * next_power_of_two(-(-most // wanted))
    return Plan(blocks, span, -(-prototypes // span), tokens <= _FEW)


class PrototypeLauncher:
    """Two launches for a layer of one distilled memory, or of several.

    Eager decoding waits for the CPU, so whatever does not change between calls is worked out once.

    Args:
        tensors: The prototypes.
        top: Experts that the router chooses, to count changed choices; 0: do not count them.
    """

    def __init__(self, tensors: PrototypeTensors, top: int) -> None:
        self.tensors = tensors
        self.top = top
        self.wide = tensors.factors.dtype == torch.float32
        self.memories, self.experts = len(tensors.sizes), tensors.experts
        self.prototypes, self.width = tensors.prototypes, tensors.centre.shape[1]
        self.device = device_constants(tensors.factors.device)
        self._runs: dict[tuple[object, ...], _Run] = {}

    def __call__(
        self,
        inputs: Tensor,
        logits: Tensor,
        counts: Tensor,
        real: Tensor | None,
        slots: Tensor | None = None,
        calls: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Recall, mix, and add the call to `counts`.

        Args:
            inputs: Router inputs. Shape [T, d].
            logits: The router's own logits. Shape [T, N].
            counts: Calls, tokens, changed tokens and summed confidence of each memory; changed in
                place. Shape [S, 4], or [4] for one memory.
            real: Which tokens are no padding; None: all. Shape [T] bool.
            slots: The memory of each token, -1: none. None: there is one memory. Shape [T] int32.
            calls: With `slots`, 1 for each memory that is used. Shape [S] int64.

        Returns:
            Mixed logits [T, N] in the logits' dtype, and confidence [T] in fp32. A token without a
            memory keeps its logits, and its confidence is 0.
        """
        inputs, logits = inputs.contiguous(), logits.contiguous()
        count = inputs.shape[0]
        mixed = torch.empty_like(logits)
        confidence = torch.empty(count, dtype=torch.float32, device=inputs.device)
        if not count:
            counts.view(-1, 4)[:, 0] += 1 if calls is None else calls
        elif count <= _AT_ONCE:
            arrays = inputs, logits, counts, real, slots, calls, mixed, confidence
            self._run(arrays, first=1)
        else:
            for start in range(0, count, _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                some_real = None if real is None else real[part]
                some_slots = None if slots is None else slots[part]
                arrays = (
                    inputs[part], logits[part], counts, some_real, some_slots, calls, mixed[part],
                    confidence[part],
                )  # fmt: skip
                self._run(arrays, first=int(start == 0))
        return mixed, confidence

    def _run(self, arrays: _Arrays, first: int) -> None:
        inputs, logits, _, real, slots, *_ = arrays
        plan = make_plan(inputs.shape[0], self.prototypes, self.experts, wide=self.wide)
        masked, slotted = real is not None, slots is not None
        key = plan, masked, slotted, inputs.dtype, logits.dtype
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _Run(self, plan, masked=masked, slotted=slotted)
        run(arrays, first)


# inputs, logits, counts, real, slots, calls, mixed, confidence
_Arrays = tuple[
    Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor
]  # fmt: skip


class _Run:
    """The two launches of one plan."""

    def __init__(
        self, launcher: PrototypeLauncher, plan: Plan, *, masked: bool, slotted: bool
    ) -> None:
        blocks, tensors = plan.blocks, launcher.tensors
        padded, experts, width = _pad_experts(launcher.experts), launcher.experts, launcher.width
        self.plan = plan
        self.prototypes = launcher.prototypes
        self.memories = launcher.memories
        self.stride = -(-((plan.splits + 1) * padded + 2 * plan.splits) // 16) * 16
        self.programs = plan.splits + -(-experts // blocks.rows)
        self.per = 1 if plan.few else _PER
        split = next_power_of_two(plan.splits)
        constants = {
            "S": launcher.memories, "D": width, "N": experts, "SLOTS": int(slotted),
            "SPLITS": plan.splits, "SPAN": plan.span, "STRIDE": self.stride,
            "TOKENS": blocks.tokens, "ROWS": blocks.rows, "TOP": launcher.top,
            "MASKED": int(masked), "NP": padded, "SP": split,
            "MP": next_power_of_two(launcher.memories),
            "LINES": next_power_of_two(-(-width // _LINE)),
            "CHUNK": max(min(split, _JOINED // padded), 1), "PER": self.per,
            "PREFETCH": int(launcher.device["PDL"] and plan.few and not slotted),
            **launcher.device,
        }  # fmt: skip
        smallest = max(next_power_of_two(width), 16)
        self.compare = KernelLauncher(
            kernels().compare_prototypes,
            (tensors.factors, tensors.offsets, tensors.updates, tensors.sizes, tensors.widths),
            constants | {"COLUMNS": min(blocks.columns, smallest)},
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        self.mix = KernelLauncher(
            kernels().mix_prototypes,
            (tensors.factors, tensors.centre, tensors.sizes, tensors.widths),
            constants | {"COLUMNS": min(_NORM, smallest)},
            num_warps=_MIX_WARPS,
        )

    def __call__(self, arrays: _Arrays, first: int) -> None:
        inputs, logits, counts, real, slots, calls, mixed, confidence = arrays
        count = inputs.shape[0]
        scratch = torch.empty(count * self.stride, dtype=torch.float32, device=inputs.device)
        # Where a kernel reads nothing, any tensor will do.
        slots, calls = (
            slots if slots is not None else counts,
            calls if calls is not None else counts,
        )
        self.compare(
            (self.programs, -(-count // self.plan.blocks.tokens), self.memories),
            before=(inputs, slots, scratch),
            after=(),
            numbers=(count, self.prototypes),
        )
        mask = counts if real is None else real
        self.mix(
            (-(-count // self.per), 1, 1),
            before=(logits, inputs, slots, calls, counts, mask, mixed, confidence, scratch),
            after=(),
            numbers=(count, first),
        )


def _pad_experts(experts: int) -> int:
    return max(next_power_of_two(experts), 16)


def kernels() -> Any:
    """Import the kernels when they are first needed: Triton may be missing."""
    import knn_moe.recall.kernels as package

    return package
