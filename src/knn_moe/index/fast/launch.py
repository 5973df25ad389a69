"""The kernels of `fast`, launched: which of them, how many programs, what room they need.

A few queries need two launches, some need a matrix product and two, many need two products and
four. Kernels are compiled when they are first met.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.index.exact import product
from knn_moe.index.fast.tensors import Parts, Settings, Shapes, power, shapes_of

FEW: Final = 4  # queries that one launch serves
_SOME: Final = 256  # queries whose coarse distances come with their projection
_PER_QUEUE: Final = 16  # programs that share a queue, where it is long
_AT_ONCE: Final = 8192  # queries served together: bounds what the queues hold
_ROWS: Final = 4  # rows of a matrix that one program multiplies
_COLUMNS: Final = 4096  # and columns at a time
_A_WARP: Final = 512  # of them for each warp
_PROGRAMS: Final = 384  # for a query: they run at once, three to a multiprocessor


def recall(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    parts: Parts,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Mixed logits and confidence; the call is added to `counts`.

    Shapes: inputs [T, d], prepared; logits [T, N]; counts [4], see hooks.Counts; real [T] bool,
    None: all are → [T, N] in the logits' dtype, [T] fp32.
    """
    if len(inputs) <= FEW:
        return FewLauncher(parts, settings)(inputs, logits, counts, real)
    inputs, logits = inputs.contiguous(), logits.contiguous()
    mixed = torch.empty_like(logits)
    confidence = torch.empty(len(inputs), dtype=torch.float32, device=inputs.device)
    if len(inputs) <= min(_SOME, _AT_ONCE):
        _scan_pairs(inputs, parts, settings, (logits, counts, real, mixed, confidence))
        return mixed, confidence
    shapes = shapes_of(parts, settings)
    for start in range(0, len(inputs), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        projected, found = _scan_queues(inputs[part], parts, settings)
        kernels().finish[(len(projected),)](
            inputs[part], logits[part], counts, counts if real is None else real[part],
            mixed[part], confidence[part], projected, parts.shift, parts.dropped, parts.centre,
            parts.constants, parts.value_codes, parts.value_steps, parts.value_centre, found,
            inputs.shape[1], projected.stride(0), int(start == 0),
            R=shapes.r, N=shapes.n, K=settings.k, KP=shapes.kp, PROBES=settings.probes,
            VALUE_BITS=shapes.value_bits, COSINE=settings.cosine, TOP=settings.top,
            MASKED=int(real is not None), DP=shapes.dp, RP=shapes.rp, NP=shapes.np,
            FOUND=shapes.found, num_warps=2,
        )  # fmt: skip
    return mixed, confidence


def nearest(inputs: Tensor, parts: Parts, settings: Settings) -> tuple[Tensor, Tensor]:
    """As FastIndex.estimate. Shapes: inputs [T, d] → squared distances, places [T, k]."""
    inputs = inputs.contiguous()
    shapes = shapes_of(parts, settings)
    distances = torch.empty(len(inputs), settings.k, dtype=torch.float32, device=inputs.device)
    places = torch.empty(len(inputs), settings.k, dtype=torch.int64, device=inputs.device)
    search = _scan_pairs if len(inputs) <= min(_SOME, _AT_ONCE) else _scan_queues
    for start in range(0, len(inputs), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        projected, found = search(inputs[part], parts, settings)
        kernels().merge[(len(projected),)](
            inputs[part], projected, parts.shift, parts.dropped, parts.centre, parts.constants,
            found, distances[part], places[part], inputs.shape[1], projected.stride(0),
            R=shapes.r, K=settings.k, KP=shapes.kp, PROBES=settings.probes, DP=shapes.dp,
            RP=shapes.rp, FOUND=shapes.found, num_warps=2,
        )  # fmt: skip
    return distances, places


def _scan_pairs(
    inputs: Tensor,
    parts: Parts,
    settings: Settings,
    mixing: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Projected queries [T, r + L], and what each of their lists found [T, probes, KP].

    `mixing`: logits, counts, real, and where mixed logits and confidence go.
    """
    shapes, early_launch = _with_options(parts, settings)
    count, device = len(inputs), inputs.device
    found = torch.empty(count, settings.probes, shapes.kp, dtype=torch.int64, device=device)
    words = torch.empty(count, 2 * shapes.wp + 1, dtype=torch.int32, device=device)
    early = torch.empty(count, 1 + shapes.np, dtype=torch.float32, device=device)
    lists = torch.empty(count, settings.probes, dtype=torch.int32, device=device)
    arrived = torch.empty(count, dtype=torch.int32, device=device)
    projected = product(inputs, parts.stacked)
    logits, counts, real, mixed, confidence = mixing or (words, found, None, words, early)
    kernels().choose[(count, 2)](
        inputs, logits, projected, parts.shift, parts.centre, parts.constants, lists, words, early,
        arrived, len(parts.points), inputs.shape[1], projected.stride(0),
        R=shapes.r, N=shapes.n, PROBES=settings.probes, BITS=shapes.bits,
        TOP=settings.top if mixing else 0, PP=power(settings.probes), LP=shapes.lp, DP=shapes.dp,
        RP=shapes.rp, NP=shapes.np, WP=shapes.wp, PDL=shapes.pdl, num_warps=4, **early_launch,
    )  # fmt: skip
    kernels().scan_pairs[(lists.numel(),)](
        logits, counts, counts if real is None else real, mixed, confidence, words, early, arrived,
        lists, found, parts.begin, parts.codes.view(torch.int32), parts.norms, parts.dropped,
        parts.constants, parts.value_codes, parts.value_steps, parts.value_centre,
        R=shapes.r, N=shapes.n, K=settings.k, KP=shapes.kp, PROBES=settings.probes,
        BITS=shapes.bits, VALUE_BITS=shapes.value_bits, COSINE=settings.cosine,
        TOP=settings.top if mixing else 0, MASKED=int(real is not None), NP=shapes.np,
        WP=shapes.wp, FOUND=shapes.found, MIX=int(mixing is not None), ASM=shapes.asm,
        PDL=shapes.pdl, num_warps=4, **early_launch,
    )  # fmt: skip
    return projected, found


def _scan_queues(inputs: Tensor, parts: Parts, settings: Settings) -> tuple[Tensor, Tensor]:
    """As _scan_pairs, without the mixing; projected queries [T, r]."""
    shapes, count, device = shapes_of(parts, settings), len(inputs), inputs.device
    found = torch.empty(count, settings.probes, shapes.kp, dtype=torch.int64, device=device)
    projected = product(inputs, parts.stacked[: shapes.r])
    points = torch.empty(count, shapes.r, dtype=parts.points.dtype, device=device)
    kernels().round_queries[(-(-points.numel() // 4096),)](
        projected, parts.shift, points, points.numel(), R=shapes.r, BLOCK=4096
    )
    coarse = product(points, parts.points)
    queues = torch.empty(len(parts.points), count, dtype=torch.int32, device=device)
    lengths = torch.zeros(len(parts.points), dtype=torch.int32, device=device)
    kernels().queue_up[(count,)](
        coarse, parts.point_norms, queues, lengths, count, len(parts.points),
        PROBES=settings.probes, PP=power(settings.probes), LP=shapes.lp,
        num_warps=min(max(shapes.lp // 512, 1), 8),
    )  # fmt: skip
    typical = count * settings.probes / len(parts.points)  # queries in a queue
    block = 16 if typical < 32 else 64
    # Queues differ in length, up to all queries in one: enough programs for that, most of which
    # find nothing to do.
    programs = min(-(-count // block), _PER_QUEUE)
    width = parts.codes.shape[1]
    kernels().scan_queues[(len(parts.points), programs)](
        points, parts.codes, parts.norms, parts.begin, queues, lengths, found, count, R=shapes.r,
        BITS=shapes.bits, KP=shapes.kp, PROBES=settings.probes, QUERIES=block,
        CHUNK=min(width & -width, 128), num_warps=4,
    )  # fmt: skip
    return projected, found


class FewLauncher:
    """Two launches for a few queries. Eager decoding waits for the CPU: what does not change from
    call to call is worked out once."""

    def __init__(self, parts: Parts, settings: Settings) -> None:
        shapes, early_launch = _with_options(parts, settings)
        self.parts = parts
        self.rows, self.width = parts.stacked.shape
        self.lists = len(parts.points)
        self.slots = settings.probes * shapes.kp
        block = min(max(power(self.width), 32), _COLUMNS)
        warps = {"num_warps": min(max(block // _A_WARP, 1), 8)}
        self.project = _Launcher(
            "project",
            (parts.stacked, parts.shift, parts.centre, parts.constants),
            {"SLOTS": self.slots, "FOUND": shapes.found, "ROWS": _ROWS, "BLOCK": block,
             "ASM": shapes.asm, "PDL": shapes.pdl},
            warps | early_launch,
        )  # fmt: skip
        mine = -(-self.lists // _PROGRAMS)  # lists to a program
        self.programs = -(-self.lists // mine)
        fixed = (
            parts.begin, parts.codes.view(torch.int32), parts.norms, parts.dropped,
            parts.constants, parts.value_codes, parts.value_steps, parts.value_centre,
        )  # fmt: skip
        self.few, self.few_masked = (
            _Launcher(
                "few",
                fixed,
                {"R": shapes.r, "N": shapes.n, "K": settings.k, "KP": shapes.kp,
                 "PROBES": settings.probes, "BITS": shapes.bits, "VALUE_BITS": shapes.value_bits,
                 "COSINE": settings.cosine, "TOP": settings.top, "MASKED": masked,
                 "LP": shapes.lp, "RP": shapes.rp, "NP": shapes.np, "WP": shapes.wp,
                 "MINE": power(mine), "FOUND": shapes.found, "ASM": shapes.asm,
                 "PDL": shapes.pdl},
                {"num_warps": 4} | early_launch,
            )
            for masked in (0, 1)
        )  # fmt: skip

    def __call__(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See recall."""
        inputs, logits = inputs.contiguous(), logits.contiguous()
        count = inputs.shape[0]
        mixed = torch.empty_like(logits)
        confidence = torch.empty(count, dtype=torch.float32, device=inputs.device)
        stride = self.rows + 1
        projected = torch.empty(count * stride, dtype=torch.float32, device=inputs.device)
        found = torch.empty(count * self.slots, dtype=torch.int64, device=inputs.device)
        if not count:
            counts[0] += 1
            return mixed, confidence
        self.project(
            (-(-self.rows // _ROWS) + 1, count, 1),
            before=(inputs,),
            after=(projected, found),
            numbers=(self.width, self.rows, stride),
        )
        few, mask = (self.few, counts) if real is None else (self.few_masked, real)
        few(
            (self.programs + 1, count, 1),
            before=(logits, counts, mask, mixed, confidence, projected, found),
            after=(),
            numbers=(self.lists, stride),
        )
        return mixed, confidence


class _Launcher:
    """Launches a kernel as it was compiled the first time, some of whose tensors never change.

    That skips looking at what the arguments are; that they are what the kernel was compiled for is
    seen to here: the same dtype of the first, the same numbers, all tensors aligned.
    """

    def __init__(
        self,
        name: str,
        fixed: tuple[Tensor, ...],
        constants: dict[str, int],
        options: dict[str, Any],
    ) -> None:
        self.name = name
        self.fixed = fixed
        self.fixed_pointers = [tensor.data_ptr() for tensor in fixed]
        self.constants = constants
        self.options = options
        self.runners: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        *,
        before: tuple[Tensor, ...],
        after: tuple[Tensor, ...],
        numbers: tuple[int, ...],
    ) -> None:
        """Arguments in the kernel's order: `before`, those that never change, `after`, numbers."""
        first = [tensor.data_ptr() for tensor in before]
        last = [tensor.data_ptr() for tensor in after]
        met = (before[0].dtype, grid, numbers)
        aligned = not any(pointer & 15 for pointer in (*first, *last))
        runner = self.runners.get(met) if aligned else None
        if runner is not None:
            runner(*first, *self.fixed_pointers, *last, *numbers, *self.constants.values())
            return
        tensors = (*before, *self.fixed, *after)
        kernel = getattr(kernels(), self.name)
        compiled = kernel[grid](*tensors, *numbers, **self.constants, **self.options)
        if aligned and compiled is not None:  # the interpreter compiles nothing
            self.runners[met] = compiled[grid]


def _with_options(parts: Parts, settings: Settings) -> tuple[Shapes, dict[str, bool]]:
    """Shapes, and the option to launch kernels early where they can wait for the one before."""
    shapes = shapes_of(parts, settings)
    return shapes, {"launch_pdl": True} if shapes.pdl else {}


def kernels() -> Any:
    """Imported when first needed: triton may be missing."""
    import knn_moe.index.fast.kernels as found

    return found
