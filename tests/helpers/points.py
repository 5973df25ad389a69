"""Points to search among, and the distances between them in float64."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def clustered(count: int, width: int, clusters: int = 20, noise: float = 1.0) -> Tensor:
    """Draw points around cluster centres; the spread of the directions falls as a power law."""
    centres = 2 * torch.randn(clusters, width)
    points = centres[torch.randint(clusters, (count,))] + noise * torch.randn(count, width)
    return points * torch.arange(1, width + 1) ** -0.75


def split(points: Tensor, queries: int = 100) -> tuple[Tensor, Tensor]:
    """Return keys, and as many of the points as queries."""
    return points[queries:], points[:queries]


def squared_distances(queries: Tensor, keys: Tensor) -> Tensor:
    """Shapes: queries [T, d]; keys [M, d] → [T, M] float64."""
    exactly = "donot_use_mm_for_euclid_dist"
    return torch.cdist(queries.double(), keys.double(), compute_mode=exactly).square()


def share_found(rows: Tensor, expected: Tensor) -> float:
    """Return the share of `rows` that are among the expected ones of their query."""
    return (rows[:, :, None] == expected[:, None, :]).any(dim=-1).float().mean().item()
