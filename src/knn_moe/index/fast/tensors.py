"""What the kernels of `fast` read, and its shapes: all that is known before any call."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.index.fast.index import FastIndex
from knn_moe.index.fast.values import PackedValues

_ALIGNED: Final = 8  # cuBLAS is slow on matrices whose rows are not
_EARLY_LAUNCH: Final = (9, 0)  # compute capability from which a kernel can wait for the one before


class Parts(NamedTuple):
    """What the kernels read. Shapes as in FastIndex and PackedValues, and: stacked [r + L, d], the
    projection and under it -2 times each centre's; shift [r + L], to be taken off their results;
    points [L, r], the centres, and point_norms [L]; constants [8]: step, correction, and the
    kernel: γ for weights, γ for λ, λ's factor. L is rounded up, with lists that are never near.
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


class Settings(NamedTuple):
    """What is asked of the kernels, beyond the tensors' shapes."""

    k: int
    probes: int
    cosine: int = 0  # the similarity: 1 cosine, 0 RBF
    top: int = 0  # experts chosen, to count changes of; 0: not counted


def make_parts(index: FastIndex, values: PackedValues, kernel: Tensor) -> Parts:
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
    grid = torch.stack([index.step, *index.correction])
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
        constants=torch.cat([grid.float(), kernel.float().to(grid.device)]),
        value_codes=values.codes,
        value_steps=values.steps,
        value_centre=values.centre,
    )


class Shapes(NamedTuple):
    """What kernels are compiled for, beside Settings. Names ending in p: the next power of two."""

    r: int
    n: int
    bits: int
    value_bits: int
    kp: int
    lp: int
    dp: int
    rp: int
    np: int
    wp: int  # words of a code
    found: int  # what a query's lists find
    asm: int  # whether kernels may speak PTX
    pdl: int  # whether they may be launched before the kernel before them is done


def shapes_of(parts: Parts, settings: Settings) -> Shapes:
    bits = 4 if parts.codes.dtype == torch.uint8 else 8
    r = parts.codes.shape[1] * 8 // bits
    nvidia = parts.codes.is_cuda and torch.version.hip is None
    device = parts.codes.device
    return Shapes(
        r=r,
        n=len(parts.value_centre),
        bits=bits,
        value_bits=4 if parts.value_codes.dtype == torch.uint8 else 8,
        kp=power(settings.k),
        lp=power(len(parts.points)),
        dp=power(parts.stacked.shape[1]),
        rp=power(r),
        np=power(len(parts.value_centre)),
        wp=power(parts.codes.shape[1] // 4),
        found=power(settings.probes * power(settings.k)),
        asm=int(nvidia),
        pdl=int(nvidia and torch.cuda.get_device_capability(device) >= _EARLY_LAUNCH),
    )


def power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()
