"""A centred projection onto a grid of whole numbers, and how far off it leaves a distance.

Keys are centred, projected onto their leading principal directions, rotated at random so that
every coordinate has the same spread, and rounded to a grid with one step for all coordinates. A
squared distance between grid points is then a whole number, the same on any device and in whatever
order it is summed.

Only the norm of what the projection drops is stored: ‖x - k‖² = ‖Px - Pk‖² + ‖x⊥‖² + ‖k⊥‖² -
2 x⊥·k⊥, and near neighbours are near in what was dropped too. How near is estimated from the keys'
own nearest neighbours (`fit_correction`).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.index.exact import spread_evenly

LARGEST: Final = 127  # coordinate on the grid
COARSE: Final = 16  # grid steps to a step of a four-bit key
FARTHEST: Final = (1 << 22) - 2  # estimates are clamped here: 22 bits, and 9 for a place in a list
_SAMPLE: Final = 1 << 16  # keys that the directions are computed from
_BOUNDS: Final = ((0.0, 1.0), (-4.0, 0.9))  # of ρ and a
_FAR_OUT: Final = 16  # times the 0.9 quantile of squared distances from the mean: an outlier
_SPREAD: Final = {4: 16 / 0.335, 8: 32.0}  # grid steps to a standard deviation (4: least error)


class Grid(NamedTuple):
    """The projection onto a grid.

    Shapes: projection [r, d], from inputs to grid units; offset [r], the projected centre;
    centre [d]; step [], the length of a grid unit.
    """

    projection: Tensor
    offset: Tensor
    centre: Tensor
    step: Tensor

    @staticmethod
    def fit(keys: Tensor, dims: int, bits: int) -> Grid:
        """Fit a grid of `dims` dimensions to the keys' own spread. Shapes: keys [M, d]."""
        sample = keys[spread_evenly(_SAMPLE, len(keys), keys.device)].float()
        # An outlier would shift the centre, and take up a direction, for all other keys.
        away = (sample - sample.mean(dim=0)).square().sum(dim=-1)
        sample = sample[away <= _FAR_OUT * away.quantile(0.9)]
        centre = sample.mean(dim=0)
        sample = sample - centre
        leading = principal_axes(sample.T @ sample).flip(1)[:, :dims].T
        directions = _rotation(dims, keys.device)[:, : len(leading)] @ leading
        spread = (sample @ directions.T).square().mean(dim=-1).median().sqrt()
        # Keys that are all equal have no spread: any step will do.
        step = torch.where(spread > 0, spread, torch.ones_like(spread)) / _SPREAD[bits]
        projection = (directions / step).to(keys.dtype)
        return Grid(projection, projection.float() @ centre, centre, step)

    def project(self, vectors: Tensor) -> Tensor:
        """Return grid coordinates, not yet rounded. Shapes: vectors [T, d] → [T, r] fp32."""
        return vectors.float() @ self.projection.float().T - self.offset

    def dropped(self, vectors: Tensor, projected: Tensor) -> Tensor:
        """Return ‖x⊥‖² in grid units: what the projection drops, and what lies beyond the grid.

        That the latter may point away from a key is ignored: the distance of a query far outside
        the grid may be a quarter too small.
        Shapes: vectors [T, d]; projected [T, r] → [T].
        """
        whole = ((vectors.float() - self.centre) / self.step).square().sum(dim=-1)
        beyond = (projected.abs() - LARGEST).clamp(min=0).square().sum(dim=-1)
        return (whole - projected.square().sum(dim=-1)).clamp(min=0) + beyond


def round_to_grid(projected: Tensor) -> Tensor:
    """Return the nearest grid point, whole numbers in fp32. Shapes: [T, r] → [T, r]."""
    return projected.round().clamp(-LARGEST, LARGEST)


def to_codes(projected: Tensor, bits: int) -> Tensor:
    """Return the stored code of a key: -8..7 or -127..127. Shapes: [M, r] → [M, r]."""
    if bits == 8:
        return round_to_grid(projected)
    return torch.floor(projected / COARSE).clamp(-8, 7)


def from_codes(codes: Tensor, bits: int) -> Tensor:
    """Return the grid point of a code, the middle of its step. Shapes: [..., r] → fp32."""
    return codes.float() if bits == 8 else codes.float() * COARSE + COARSE // 2


class Correction(NamedTuple):
    """The estimate of a distance from grid points. Fields are [] fp32.

    d² ≈ ‖Px - Pk‖² + ‖x⊥‖² + ‖k⊥‖² - 2ρ ‖x⊥‖ ‖k⊥‖ - a ‖Px - Pk‖² - surplus, in grid units: near
    keys are near in what was dropped, the nearer the more so, and rounding adds about the same to
    every distance. The search ranks by ‖Px - Pk‖² + w ‖k⊥‖² instead: it cannot afford products with
    ‖x⊥‖, and w = (1 - ρ) / (1 - a) replaces them for similar norms.
    """

    correlation: Tensor  # ρ
    shrinkage: Tensor  # a
    surplus: Tensor
    weight: Tensor  # w

    def apply(self, estimate: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return d² in grid units, at least 0, from ‖Px - Pk‖² + w ‖k⊥‖².

        Shapes: estimate, key (‖k⊥‖) [T, K]; query (‖x⊥‖²) [T] → [T, K].
        """
        query, square = query[:, None], key.square()
        projected = estimate - self.weight * square
        error = (
            2 * self.correlation * query.sqrt() * key + self.shrinkage * projected + self.surplus
        )
        return (projected + square + query - error).clamp(min=0)


def fit_correction(projected: Tensor, query: Tensor, key: Tensor, exact: Tensor) -> Correction:
    """Fit a Correction by least squares to pairs of near points.

    Without bounds, a few pairs, or pairs with nothing dropped, would make far keys near.
    Shapes: projected (‖Px - Pk‖²), query (‖x⊥‖²), key (‖k⊥‖), exact (d²) [n], in grid units.
    """
    if not len(exact):
        nothing = torch.zeros((), device=exact.device)
        return Correction(nothing, nothing, nothing, nothing)
    parts = torch.stack([2 * query.sqrt() * key, projected], dim=-1).double().cpu()
    error = (projected + query + key.square() - exact).double().cpu()
    # Relative errors count; otherwise one distant pair would outweigh all others.
    share = 1 / (exact + exact.median() + 1).double().cpu()
    mean = share.square() / share.square().sum()
    centred = (parts - mean @ parts) * share[:, None]
    wanted = (error - mean @ error) * share
    # Columns of one size: the solver takes a small one for zero. A column that is constant over
    # all pairs is dropped: the surplus holds it.
    spread = centred.abs().mean(dim=0)
    size = torch.where(spread > 1e-6 * (share @ parts.abs() / len(parts)), spread, math.inf)
    slopes: list[Tensor] = []
    for place, (low, high) in enumerate(_BOUNDS):
        table = centred[:, place:] / size[place:]
        solution = torch.linalg.lstsq(table, wanted[:, None], driver="gelsd").solution
        slopes.append((solution[0, 0] / size[place]).clamp(low, high))
        wanted = wanted - slopes[-1] * centred[:, place]
    correlation, shrinkage = slopes
    surplus = mean @ (error - parts @ torch.stack(slopes))
    weight = ((1 - correlation) / (1 - shrinkage)).clamp(0, 1)
    return Correction(
        *torch.stack([correlation, shrinkage, surplus, weight]).float().to(exact.device)
    )


def principal_axes(covariance: Tensor) -> Tensor:
    """Return eigenvectors as columns, by ascending eigenvalue. Shapes: [d, d] → [d, d].

    The solver may fail on keys that are all equal, of which only rounding errors are left: hence
    the identity, which turns no axis.
    """
    largest = covariance.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    identity = torch.eye(len(covariance), device=covariance.device)
    axes: Tensor = torch.linalg.eigh(covariance / largest + 1e-7 * identity).eigenvectors
    return axes


def _rotation(dims: int, device: torch.device) -> Tensor:
    draw = torch.randn(dims, dims, generator=torch.Generator().manual_seed(0))
    rotation: Tensor = torch.linalg.qr(draw).Q.to(device)
    return rotation
