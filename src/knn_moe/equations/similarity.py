"""Similarity functions s(x, k) of a router input and a stored key (§4.2, §5.1).

Every similarity is a function of a squared Euclidean distance between prepared vectors, so that
each of them runs on every index. They are computed as logarithms: exp(-γ d²) underflows for distant
queries, and weights are ratios of similarities. Pure torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor


def rbf(squared_distance: Tensor, gamma: Tensor) -> Tensor:
    """Return log s = -γ d², the paper's RBF similarity (§5.1).

    Shapes: squared_distance [...]; gamma [] or broadcastable. Result [...], at most 0.
    """
    return -gamma * squared_distance


def cosine(squared_distance: Tensor, gamma: Tensor) -> Tensor:
    """Return log s of s = max(0, cos(x, k)), from d² between unit vectors: cos = 1 - d²/2.

    The paper does not define negative cosines; λ is a mixing weight, so they count as 0. γ is not
    used.

    Shapes: squared_distance [...]. Result [...], at most 0, -inf where s = 0.
    """
    return torch.log((1 - squared_distance / 2).clamp(0, 1))


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors to length one; the zero vector stays zero.

    Divides by the largest magnitude first, because the square of a large entry would overflow.

    Shapes: vectors [..., d]. Result [..., d].
    """
    wide = vectors.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return F.normalize(wide / largest, dim=-1).to(vectors.dtype)


def unchanged(vectors: Tensor) -> Tensor:
    """Return the vectors as they are. Shapes: [..., d] → [..., d]."""
    return vectors


@dataclass(frozen=True)
class Similarity:
    """A similarity: `prepare` keys and queries, search by squared distance, then take `log`."""

    name: str
    prepare: Callable[[Tensor], Tensor]
    log: Callable[[Tensor, Tensor], Tensor]
    uses_gamma: bool


SIMILARITIES: Final[Mapping[str, Similarity]] = {
    entry.name: entry
    for entry in (
        Similarity("rbf", unchanged, rbf, uses_gamma=True),
        Similarity("rbf-unit", unit, rbf, uses_gamma=True),
        Similarity("cosine", unit, cosine, uses_gamma=False),
    )
}
