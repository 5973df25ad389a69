"""What the kernels of `fast` read, and the sizes they are compiled for.

All of it is known before any call. Knows tensors and shapes; nothing of Triton.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.index.fast.index import FastIndex
from knn_moe.index.fast.launcher import device_constants
from knn_moe.index.fast.values import PackedValues

_ALIGNED: Final = 8  # cuBLAS is slow on matrices whose rows are not a multiple of this


class KernelTensors(NamedTuple):
    """The tensors that the kernels read.

    Shapes as in FastIndex and PackedValues, and: stacked [r + L, d], the projection and below it
    -2 times each projected list centre; shift [r + L], subtracted from products with `stacked`;
    points [L, r], the list centres; point_norms [L]; constants [8]: step, the four numbers of
    Correction, γ for the weights, γ for λ, λ's factor. L is rounded up with lists that are never
    near.
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


class KernelConfig(NamedTuple):
    """What a call asks of the kernels, beyond the tensors' shapes."""

    k: int
    probes: int
    cosine: int = 0  # the similarity: 1 cosine, 0 RBF
    top_k: int = 0  # experts that the router chooses, to count changes; 0: do not count


def prepare_tensors(index: FastIndex, values: PackedValues, widths: Tensor) -> KernelTensors:
    """Arrange an index and its values for the kernels.

    Args:
        index: The index; its tensors are shared, not copied, where they can be.
        values: The values, in the index's order.
        widths: γ for the weights, γ for λ, λ's factor. Shape [3].
    """
    points = index.centres.float()
    norms = points.square().sum(dim=-1)
    composed = -2 * points @ index.projection.float()
    # Coarse distances are only compared: scaled by a power of two, fp16 can hold their rows.
    scale = 2.0 ** -composed.abs().amax().clamp(min=1).log2().ceil()
    composed = (scale * composed).to(index.projection.dtype).float()
    shift = composed @ index.centre - scale * norms
    spare = -(len(index.projection) + len(points)) % _ALIGNED
    never = torch.full((spare,), float("-inf"), device=points.device)
    zeros = points.new_zeros(spare, composed.shape[1])
    stacked = torch.cat([index.projection.float(), composed, zeros])
    points = torch.cat([points, points.new_zeros(spare, points.shape[1])])
    grid = torch.stack([index.step, *index.correction])
    return KernelTensors(
        stacked=stacked.to(index.projection.dtype),
        shift=torch.cat([index.offset, shift, never]),
        points=points.to(torch.bfloat16 if points.is_cuda else torch.float32),
        point_norms=torch.cat([norms, -never]),
        begin=torch.cat([index.begin, index.begin[-1:].expand(spare)]),
        codes=index.codes,
        norms=index.norms,
        dropped=index.dropped,
        centre=index.centre,
        constants=torch.cat([grid.float(), widths.float().to(grid.device)]),
        value_codes=values.codes,
        value_steps=values.steps,
        value_centre=values.centre,
    )


def kernel_constants(tensors: KernelTensors, config: KernelConfig) -> dict[str, int]:
    """Return what kernels are compiled for, by the names that kernels/__init__.py lists."""
    bits = 4 if tensors.codes.dtype == torch.uint8 else 8
    r, width = tensors.codes.shape[1] * 8 // bits, tensors.stacked.shape[1]
    experts, probes = len(tensors.value_centre), config.probes
    return {
        "R": r,
        "N": experts,
        "K": config.k,
        "PROBES": probes,
        "BITS": bits,
        "VALUE_BITS": 4 if tensors.value_codes.dtype == torch.uint8 else 8,
        "COSINE": config.cosine,
        "TOP": config.top_k,
        "KP": next_power_of_two(config.k),
        "PP": next_power_of_two(probes),
        "LP": next_power_of_two(len(tensors.points)),
        "DP": next_power_of_two(width),
        "RP": next_power_of_two(r),
        "NP": next_power_of_two(experts),
        "WP": next_power_of_two(tensors.codes.shape[1] // 4),
        "FOUND": next_power_of_two(probes * next_power_of_two(config.k)),
        **device_constants(tensors.codes.device),
    }


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
