"""Points to search among, and the distances between them in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def clustered(count: int, width: int, clusters: int = 20, noise: float = 1.0) -> Tensor:
    """Points around cluster centres, the directions' spread falling off as a power law."""
    centres = 2 * torch.randn(clusters, width)
    points = centres[torch.randint(clusters, (count,))] + noise * torch.randn(count, width)
    return points * torch.arange(1, width + 1) ** -0.75


def split(points: Tensor, queries: int = 100) -> tuple[Tensor, Tensor]:
    """Keys, and as many of the points as queries."""
    return points[queries:], points[:queries]


def all_distances(queries: Tensor, keys: Tensor) -> Tensor:
    """Shapes: queries [T, d]; keys [M, d] → [T, M]."""
    return torch.cdist(queries.double(), keys.double(), compute_mode="donot_use_mm_for_euclid_dist")
