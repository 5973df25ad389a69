"""Launches the kernels of `fast`: which of them, in how many programs, with what scratch memory.

Up to DECODE_QUERIES queries take two launches (kernels/decode.py); up to _SMALL_BATCH a matrix
product and two (kernels/small_batch.py); more of them two products and four launches
(kernels/prefill.py). Triton compiles a kernel when it is first launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.index.exact import dot_products
from knn_moe.index.fast.launcher import KernelLauncher, select_constants
from knn_moe.index.fast.tensors import (
    KernelConfig,
    KernelTensors,
    kernel_constants,
    next_power_of_two,
)

DECODE_QUERIES: Final = 4  # queries up to which one launch scans and mixes
_SMALL_BATCH: Final = 256  # queries up to which coarse distances come with the projection
_PER_QUEUE: Final = 16  # programs that share a list's queue, where it is long
_AT_ONCE: Final = 8192  # queries served together: bounds the memory of the queues
_ROWS: Final = 4  # rows of a matrix that one program multiplies
_COLUMNS: Final = 4096  # and columns at a time
_COLUMNS_PER_WARP: Final = 512
_PROGRAMS: Final = 384  # for a query: they run at once, three to a multiprocessor


def recall(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    tensors: KernelTensors,
    config: KernelConfig,
) -> tuple[Tensor, Tensor]:
    """Search, weigh and mix (§4.2), and add the call to `counts`.

    Args:
        inputs: Prepared router inputs. Shape [T, d].
        logits: The router's own logits. Shape [T, N].
        counts: Calls, tokens, changed tokens and summed confidence; changed in place. Shape [4].
        real: Which tokens are no padding; None: all. Shape [T] bool.
        tensors: The index and its values.
        config: Neighbours, probes, similarity and top k.

    Returns:
        Mixed logits [T, N] in the logits' dtype, and confidence [T] in fp32.
    """
    if len(inputs) <= DECODE_QUERIES:
        return DecodeLauncher(tensors, config)(inputs, logits, counts, real)
    inputs, logits = inputs.contiguous(), logits.contiguous()
    mixed = torch.empty_like(logits)
    confidence = torch.empty(len(inputs), dtype=torch.float32, device=inputs.device)
    if len(inputs) <= min(_SMALL_BATCH, _AT_ONCE):
        _scan_pairs(inputs, tensors, config, (logits, counts, real, mixed, confidence))
        return mixed, confidence
    constants = kernel_constants(tensors, config) | {"MASKED": int(real is not None)}
    for start in range(0, len(inputs), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        projected, found = _scan_queues(inputs[part], tensors, config)
        _launch(
            "mix_found", (len(projected),),
            inputs[part], logits[part], counts, counts if real is None else real[part],
            mixed[part], confidence[part], projected, tensors.shift, tensors.dropped,
            tensors.centre, tensors.constants, tensors.value_codes, tensors.value_steps,
            tensors.value_centre, found, inputs.shape[1], projected.stride(0), int(start == 0),
            constants=constants, num_warps=2,
        )  # fmt: skip
    return mixed, confidence


def search(inputs: Tensor, tensors: KernelTensors, config: KernelConfig) -> tuple[Tensor, Tensor]:
    """Return the k nearest keys, as FastIndex.estimate does.

    Shapes: inputs [T, d] → squared distances, places [T, k].
    """
    inputs = inputs.contiguous()
    constants = kernel_constants(tensors, config)
    distances = torch.empty(len(inputs), config.k, dtype=torch.float32, device=inputs.device)
    places = torch.empty(len(inputs), config.k, dtype=torch.int64, device=inputs.device)
    scan = _scan_pairs if len(inputs) <= min(_SMALL_BATCH, _AT_ONCE) else _scan_queues
    for start in range(0, len(inputs), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        projected, found = scan(inputs[part], tensors, config)
        _launch(
            "merge_found", (len(projected),),
            inputs[part], projected, tensors.shift, tensors.dropped, tensors.centre,
            tensors.constants, found, distances[part], places[part], inputs.shape[1],
            projected.stride(0), constants=constants, num_warps=2,
        )  # fmt: skip
    return distances, places


def _scan_pairs(
    inputs: Tensor,
    tensors: KernelTensors,
    config: KernelConfig,
    mixing: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return projected queries [T, r + L], and what each of their lists found [T, probes, KP].

    `mixing`: logits, counts, real, and where mixed logits and confidence go; None: do not mix.
    """
    constants = kernel_constants(tensors, config)
    count, device = len(inputs), inputs.device
    found = torch.empty(count, config.probes, constants["KP"], dtype=torch.int64, device=device)
    words = torch.empty(count, 2 * constants["WP"] + 1, dtype=torch.int32, device=device)
    early = torch.empty(count, 1 + constants["NP"], dtype=torch.float32, device=device)
    lists = torch.empty(count, config.probes, dtype=torch.int32, device=device)
    arrived = torch.empty(count, dtype=torch.int32, device=device)
    projected = dot_products(inputs, tensors.stacked)
    logits, counts, real, mixed, confidence = mixing or (words, found, None, words, early)
    constants["MASKED"], constants["MIX"] = int(real is not None), int(mixing is not None)
    constants["TOP"] = config.top_k if mixing else 0
    _launch(
        "choose_lists", (count, 2),
        inputs, logits, projected, tensors.shift, tensors.centre, tensors.constants, lists, words,
        early, arrived, len(tensors.points), inputs.shape[1], projected.stride(0),
        constants=constants,
    )  # fmt: skip
    _launch(
        "scan_pairs", (lists.numel(),),
        logits, counts, counts if real is None else real, mixed, confidence, words, early, arrived,
        lists, found, tensors.begin, tensors.codes.view(torch.int32), tensors.norms,
        tensors.dropped, tensors.constants, tensors.value_codes, tensors.value_steps,
        tensors.value_centre, constants=constants,
    )  # fmt: skip
    return projected, found


def _scan_queues(
    inputs: Tensor, tensors: KernelTensors, config: KernelConfig
) -> tuple[Tensor, Tensor]:
    """Return projected queries [T, r], and what each of their lists found [T, probes, KP]."""
    constants, count, device = kernel_constants(tensors, config), len(inputs), inputs.device
    found = torch.empty(count, config.probes, constants["KP"], dtype=torch.int64, device=device)
    projected = dot_products(inputs, tensors.stacked[: constants["R"]])
    points = torch.empty(projected.shape, dtype=tensors.points.dtype, device=device)
    _launch(
        "round_queries", (-(-points.numel() // 4096),),
        projected, tensors.shift, points, points.numel(), constants=constants | {"BLOCK": 4096},
    )  # fmt: skip
    coarse = dot_products(points, tensors.points)
    lists = len(tensors.points)
    queues = torch.empty(lists, count, dtype=torch.int32, device=device)
    lengths = torch.zeros(lists, dtype=torch.int32, device=device)
    _launch(
        "queue_up", (count,),
        coarse, tensors.point_norms, queues, lengths, count, lists,
        constants=constants, num_warps=min(max(constants["LP"] // 512, 1), 8),
    )  # fmt: skip
    typical = count * config.probes / lists  # queries in a queue
    block = 16 if typical < 32 else 64
    # Queues differ in length, up to all queries in one: enough programs for that, most of which
    # find nothing to do.
    programs = min(-(-count // block), _PER_QUEUE)
    width = tensors.codes.shape[1]
    _launch(
        "scan_queues", (lists, programs),
        points, tensors.codes, tensors.norms, tensors.begin, queues, lengths, found, count,
        constants=constants | {"QUERIES": block, "CHUNK": min(width & -width, 128)},
    )  # fmt: skip
    return projected, found


def _launch(
    name: str,
    grid: tuple[int, ...],
    *arguments: Tensor | int,
    constants: Mapping[str, int],
    num_warps: int = 4,
) -> None:
    """Launch a kernel, with those of the constants that it takes."""
    kernel = getattr(kernels(), name)
    kernel[grid](*arguments, **select_constants(kernel, constants), num_warps=num_warps)


class DecodeLauncher:
    """Two launches for up to DECODE_QUERIES queries.

    Eager decoding waits for the CPU, so whatever does not change between calls is worked out once.
    """

    def __init__(self, tensors: KernelTensors, config: KernelConfig) -> None:
        constants = kernel_constants(tensors, config)
        self.tensors = tensors
        self.rows, self.width = tensors.stacked.shape
        self.lists = len(tensors.points)
        self.slots = config.probes * constants["KP"]
        block = min(max(next_power_of_two(self.width), 32), _COLUMNS)
        self.project = KernelLauncher(
            kernels().decode_project,
            (tensors.stacked, tensors.shift, tensors.centre, tensors.constants),
            constants | {"SLOTS": self.slots, "ROWS": _ROWS, "BLOCK": block},
            num_warps=min(max(block // _COLUMNS_PER_WARP, 1), 8),
        )
        lists_per_program = -(-self.lists // _PROGRAMS)
        self.programs = -(-self.lists // lists_per_program)
        constants["MINE"] = next_power_of_two(lists_per_program)
        fixed = (
            tensors.begin, tensors.codes.view(torch.int32), tensors.norms, tensors.dropped,
            tensors.constants, tensors.value_codes, tensors.value_steps, tensors.value_centre,
        )  # fmt: skip
        kernel = kernels().decode_recall
        self.recall, self.recall_masked = (
            KernelLauncher(kernel, fixed, constants | {"MASKED": masked}, num_warps=4)
            for masked in (0, 1)
        )

    def __call__(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `recall`."""
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
        run, mask = (self.recall, counts) if real is None else (self.recall_masked, real)
        run(
            (self.programs + 1, count, 1),
            before=(logits, counts, mask, mixed, confidence, projected, found),
            after=(),
            numbers=(self.lists, stride),
        )
        return mixed, confidence


def kernels() -> Any:
    """Import the kernels when they are first needed: Triton may be missing."""
    import knn_moe.index.fast.kernels as package

    return package
