"""A layer's recall on a GPU, from router input to mixed logits, by the kernels of `fast`.

Launched directly from eager code; from compiled code as one operator, which CUDA graphs capture.
Needs triton: `usable` says whether it is there. Kernels are compiled when they are first met.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from knn_moe.index.exact import product
from knn_moe.index.fast import MOST_FOUND, FastIndex
from knn_moe.index.values import PackedValues

MOST_RANKED: Final = 128  # experts up to which changes are counted by the kernels
FEW: Final = 4  # queries that one launch serves
_SOME: Final = 256  # queries whose coarse distances come with their projection
_PER_QUEUE: Final = 16  # programs that share a queue, where it is long
_AT_ONCE: Final = 8192  # queries served together: bounds what the queues hold
_ROWS: Final = 4  # rows of a matrix that one program multiplies
_COLUMNS: Final = 1024  # and columns at a time
_PROGRAMS: Final = 384  # for a query: they run at once, three to a multiprocessor
_ALIGNED: Final = 8  # cuBLAS is slow on matrices whose rows are not


class Parts(NamedTuple):
    """What the kernels read. Shapes as in FastIndex and PackedValues, and: stacked [r + L, d], the
    projection and under it -2 times each centre's; shift [r + L], to be taken off their results;
    points [L, r], the centres, and point_norms [L]; constants [6]: step, correction, γ; arrived
    [FEW], zeros. L is rounded up, with lists that are never near.
    """

    stacked: Tensor
    shift: Tensor
    points: Tensor
    point_norms: Tensor
    begin: Tensor
    codes: Tensor
    norms: Tensor
    dropped: Tensor
    centre: Tensor
    constants: Tensor
    value_codes: Tensor
    value_steps: Tensor
    value_centre: Tensor
    arrived: Tensor


class Settings(NamedTuple):
    """What is asked of the kernels, beyond the tensors' shapes."""

    k: int
    probes: int
    cosine: int = 0  # the similarity: 1 cosine, 0 RBF
    top: int = 0  # experts chosen, to count changes of; 0: not counted


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(device: torch.device, k: int) -> bool:
    return device.type == "cuda" and k <= MOST_FOUND and _has_triton()


class Fused(nn.Module):
    """FastIndex and PackedValues as the kernels want them, as buffers that compilers take for
    static tensors."""

    def __init__(
        self, index: FastIndex, values: PackedValues, gamma: Tensor, settings: Settings
    ) -> None:
        super().__init__()
        self.settings = settings
        parts = make_parts(index, values, gamma)
        for name, tensor in parts._asdict().items():
            self.register_buffer(name, tensor, persistent=False)
        # One copy of the projection: the index keeps a view.
        index.projection = parts.stacked[: len(index.projection)]
        self._few = FewLauncher(parts, settings)

    def forward(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Mixed logits and confidence; the call is added to `counts`.

        Shapes: inputs [T, d], prepared; logits [T, N]; counts [4], see hooks.Counts; real [T] bool,
        None: all are → [T, N] in the logits' dtype, [T] fp32.
        """
        if torch.compiler.is_compiling():
            parts = [getattr(self, name) for name in Parts._fields]
            mixed, confidence = torch.ops.knn_moe.recall(
                inputs, logits, counts, real, parts, list(self.settings)
            )
            return mixed, confidence
        if len(inputs) <= FEW:
            return self._few(inputs, logits, counts, real)
        return recall(inputs, logits, counts, real, self._few.parts, self.settings)

    def search(self, inputs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As FastIndex.estimate. Shapes: inputs [T, d] → squared distances, places [T, k]."""
        settings = self.settings._replace(k=k)
        if torch.compiler.is_compiling():
            parts = [getattr(self, name) for name in Parts._fields]
            distances, places = torch.ops.knn_moe.nearest(inputs, parts, list(settings))
            return distances, places
        return nearest(inputs, self._few.parts, settings)


def make_parts(index: FastIndex, values: PackedValues, gamma: Tensor) -> Parts:
    points = index.centres.float()
    norms = points.square().sum(dim=-1)
    composed = -2 * points @ index.projection.float()
    # Coarse distances are only compared: scaled by a power of two, fp16 can hold their rows.
    scale = 2.0 ** -composed.abs().amax().clamp(min=1).log2().ceil()
    composed = (scale * composed).to(index.projection.dtype).float()
    shift = composed @ index.centre - scale * norms
    spare = -(len(index.projection) + len(points)) % _ALIGNED
    never = torch.full((spare,), float("-inf"), device=points.device)
    nothing = points.new_zeros(spare, composed.shape[1])
    stacked = torch.cat([index.projection.float(), composed, nothing])
    points = torch.cat([points, points.new_zeros(spare, points.shape[1])])
    constants = torch.stack([index.step, *index.correction, gamma.to(index.step.device)])
    return Parts(
        stacked=stacked.to(index.projection.dtype),
        shift=torch.cat([index.offset, shift, never]),
        points=points.to(torch.bfloat16 if points.is_cuda else torch.float32),
        point_norms=torch.cat([norms, -never]),
        begin=torch.cat([index.begin, index.begin[-1:].expand(spare)]),
        codes=index.codes,
        norms=index.norms,
        dropped=index.dropped,
        centre=index.centre,
        constants=constants.float(),
        value_codes=values.codes,
        value_steps=values.steps,
        value_centre=values.centre,
        arrived=torch.zeros(FEW, dtype=torch.int32, device=points.device),
    )


def recall(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    parts: Parts,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """See Fused.forward."""
    if len(inputs) <= FEW:
        return FewLauncher(parts, settings)(inputs, logits, counts, real)
    shapes = _shapes(parts, settings)
    inputs, logits = inputs.contiguous(), logits.contiguous()
    mixed = torch.empty_like(logits)
    confidence = torch.empty(len(inputs), dtype=torch.float32, device=inputs.device)
    for start in range(0, len(inputs), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        projected, found = _search(inputs[part], parts, settings)
        masked = real is not None
        _kernels().finish[(len(projected),)](
            inputs[part], logits[part], counts, real[part] if real is not None else counts,
            mixed[part], confidence[part], projected, parts.shift, parts.dropped, parts.centre,
            parts.constants, parts.value_codes, parts.value_steps, parts.value_centre, found,
            inputs.shape[1], projected.stride(0), int(start == 0),
            R=shapes.r, N=shapes.n, K=settings.k, KP=shapes.kp, PROBES=settings.probes,
            VALUE_BITS=shapes.value_bits, COSINE=settings.cosine, TOP=settings.top,
            MASKED=masked, DP=shapes.dp, RP=shapes.rp, NP=shapes.np, FOUND=shapes.found,
            num_warps=2,
        )  # fmt: skip
    return mixed, confidence


def nearest(inputs: Tensor, parts: Parts, settings: Settings) -> tuple[Tensor, Tensor]:
    """See Fused.search."""
    inputs = inputs.contiguous()
    shapes = _shapes(parts, settings)
    distances = torch.empty(len(inputs), settings.k, dtype=torch.float32, device=inputs.device)
    places = torch.empty(len(inputs), settings.k, dtype=torch.int64, device=inputs.device)
    for start in range(0, len(inputs), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        projected, found = _search(inputs[part], parts, settings)
        _kernels().merge[(len(projected),)](
            inputs[part], projected, parts.shift, parts.dropped, parts.centre, parts.constants,
            found, distances[part], places[part], inputs.shape[1], projected.stride(0),
            R=shapes.r, K=settings.k, KP=shapes.kp, PROBES=settings.probes, DP=shapes.dp,
            RP=shapes.rp, FOUND=shapes.found, num_warps=2,
        )  # fmt: skip
    return distances, places


def _search(inputs: Tensor, parts: Parts, settings: Settings) -> tuple[Tensor, Tensor]:
    """Projected queries [T, r or more], and what each of their lists found [T, probes, k]."""
    kernels, shapes = _kernels(), _shapes(parts, settings)
    count, device = len(inputs), inputs.device
    found = torch.empty(count, settings.probes, settings.k, dtype=torch.int64, device=device)
    if count <= _SOME:
        projected = product(inputs, parts.stacked)
        coarse, shift = projected[:, shapes.r :], parts.shift[shapes.r :]
        lists = _choose(coarse, 1.0, shift, shapes, settings)
        kernels.scan_pairs[(lists.numel(),)](
            projected, parts.shift, parts.codes.view(torch.int32), parts.norms, parts.begin, lists,
            found, projected.stride(0), R=shapes.r, BITS=shapes.bits, K=settings.k,
            PROBES=settings.probes, WP=shapes.wp, ASM=shapes.asm,
        )  # fmt: skip
        return projected, found
    projected = product(inputs, parts.stacked[: shapes.r])
    whole = torch.empty(count, shapes.r, dtype=parts.points.dtype, device=device)
    kernels.round_queries[(-(-whole.numel() // 4096),)](
        projected, parts.shift, whole, whole.numel(), R=shapes.r, BLOCK=4096
    )
    coarse = product(whole, parts.points)
    queues = torch.empty(len(parts.points), count, dtype=torch.int32, device=device)
    lengths = torch.zeros(len(parts.points), dtype=torch.int32, device=device)
    _choose(coarse, -2.0, -parts.point_norms, shapes, settings, (queues, lengths))
    typical = count * settings.probes / len(parts.points)  # queries in a queue
    block = 16 if typical < 32 else 64
    # Queues differ in length, up to all queries in one: enough programs for that, most of which
    # find nothing to do.
    programs = min(-(-count // block), _PER_QUEUE)
    kernels.scan_queues[(len(parts.points), programs)](
        whole, parts.codes, parts.norms, parts.begin, queues, lengths, found, count, R=shapes.r,
        BITS=shapes.bits, K=settings.k, PROBES=settings.probes, QUERIES=block,
        CHUNK=min(_largest_power(parts.codes.shape[1]), 128), num_warps=4,
    )  # fmt: skip
    return projected, found


def _choose(
    coarse: Tensor,
    scale: float,
    shift: Tensor,
    shapes: _Shapes,
    settings: Settings,
    queues: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Nearest lists [T, probes]; or, instead, join the queues of these lists."""
    count = len(coarse)
    size = 0 if queues else count
    lists = torch.empty(size, settings.probes, dtype=torch.int32, device=coarse.device)
    _kernels().choose[(count,)](
        coarse, shift, scale, lists, *(queues or (lists, lists)), count, coarse.shape[1],
        coarse.stride(0), PROBES=settings.probes, PP=_power(settings.probes), LP=shapes.lp,
        QUEUE=queues is not None, num_warps=min(max(shapes.lp // 512, 1), 8),
    )  # fmt: skip
    return lists


class FewLauncher:
    """Two launches for a few queries. Eager decoding waits for the CPU: what does not change from
    call to call is worked out once."""

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self.parts = parts
        shapes = _shapes(parts, settings)
        self.rows, self.width = parts.stacked.shape
        self.slots = settings.probes * shapes.kp
        self.early = 1 + shapes.np
        self.rest = (
            parts.shift, parts.begin, parts.codes.view(torch.int32), parts.norms, parts.dropped,
            parts.constants, parts.value_codes, parts.value_steps, parts.value_centre,
        )  # fmt: skip
        block = min(_power(self.width), _COLUMNS)
        self.project = _Launcher("project", {"ROWS": _ROWS, "BLOCK": block}, {"num_warps": 4})
        constants = {
            "R": shapes.r, "N": shapes.n, "K": settings.k, "KP": shapes.kp,
            "PROBES": settings.probes, "BITS": shapes.bits, "VALUE_BITS": shapes.value_bits,
            "COSINE": settings.cosine, "TOP": settings.top, "MASKED": 0, "LP": shapes.lp,
            "RP": shapes.rp,
            "NP": shapes.np, "WP": shapes.wp, "FOUND": _power(self.slots), "ASM": shapes.asm,
        }  # fmt: skip
        self.few, self.few_masked = (
            _Launcher("few", {**constants, "MASKED": masked}, {"num_warps": 4}) for masked in (0, 1)
        )
        self.programs = -(-len(parts.points) // -(-len(parts.points) // _PROGRAMS))

    def __call__(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        parts, count, device = self.parts, len(inputs), inputs.device
        inputs, logits = inputs.contiguous(), logits.contiguous()
        mixed = torch.empty_like(logits)
        confidence = torch.empty(count, dtype=torch.float32, device=device)
        if not count:
            counts[0] += 1
            return mixed, confidence
        projected = torch.empty(count, self.rows + 1 + self.early, device=device)
        found = torch.empty(count, self.slots, dtype=torch.int64, device=device)
        self.project(
            (-(-self.rows // _ROWS) + 1, count, 1),
            (inputs, parts.stacked, parts.centre, parts.constants, projected),
            (self.width, self.rows, projected.stride(0)),
        )
        few, mask = (self.few, counts) if real is None else (self.few_masked, real)
        outputs = (mixed, confidence, projected)
        few(
            (self.programs + 1, count, 1),
            (logits, counts, mask, *outputs, *self.rest, found, parts.arrived),
            (len(parts.points), projected.stride(0)),
        )
        return mixed, confidence


class _Launcher:
    """Launches a kernel as it was compiled the first time.

    That skips looking at what the arguments are; that they are what the kernel was compiled for is
    seen to here: the same dtypes and numbers, the same alignment of the first two, which come from
    outside.
    """

    def __init__(self, name: str, constants: dict[str, int], options: dict[str, int]) -> None:
        self.name = name
        self.constants = constants
        self.options = options
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[int, ...]
    ) -> None:
        first, second = tensors[:2]
        aligned = not (first.data_ptr() | second.data_ptr()) % 16
        met = (first.dtype, second.dtype, numbers)
        known = self.compiled.get(met) if aligned else None
        if known is not None:
            known[grid](*tensors, *numbers, *self.constants.values())
            return
        kernel = getattr(_kernels(), self.name)
        made = kernel[grid](*tensors, *numbers, **self.constants, **self.options)
        if aligned:
            self.compiled[met] = made


class _Shapes(NamedTuple):
    r: int
    n: int
    bits: int
    value_bits: int
    kp: int
    lp: int
    dp: int
    rp: int
    np: int
    wp: int
    found: int
    asm: int  # whether kernels may speak PTX


def _shapes(parts: Parts, settings: Settings) -> _Shapes:
    bits = 4 if parts.codes.dtype == torch.uint8 else 8
    r = parts.codes.shape[1] * 8 // bits
    return _Shapes(
        r=r,
        n=len(parts.value_centre),
        bits=bits,
        value_bits=4 if parts.value_codes.dtype == torch.uint8 else 8,
        kp=_power(settings.k),
        lp=_power(len(parts.points)),
        dp=_power(parts.stacked.shape[1]),
        rp=_power(r),
        np=_power(len(parts.value_centre)),
        wp=_power(parts.codes.shape[1] // 4),
        found=_power(settings.probes * settings.k),
        asm=int(parts.codes.is_cuda and torch.version.hip is None),
    )


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _largest_power(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


def _kernels() -> Any:
    from knn_moe.index import kernels

    return kernels


@torch.library.custom_op("knn_moe::recall", mutates_args=("counts",))
def _recall(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    parts: list[Tensor],
    settings: list[int],
) -> tuple[Tensor, Tensor]:
    return recall(inputs, logits, counts, real, Parts(*parts), Settings(*settings))


@_recall.register_fake
def _(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    parts: list[Tensor],
    settings: list[int],
) -> tuple[Tensor, Tensor]:
    mixed = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return mixed, inputs.new_empty(len(inputs), dtype=torch.float32)


@torch.library.custom_op("knn_moe::nearest", mutates_args=())
def _nearest(inputs: Tensor, parts: list[Tensor], settings: list[int]) -> tuple[Tensor, Tensor]:
    return nearest(inputs, Parts(*parts), Settings(*settings))


@_nearest.register_fake
def _(inputs: Tensor, parts: list[Tensor], settings: list[int]) -> tuple[Tensor, Tensor]:
    distances = inputs.new_empty(len(inputs), settings[0], dtype=torch.float32)
    return distances, distances.to(torch.int64)
