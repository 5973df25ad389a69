"""The kernel's width from a memory's own distances (§5.1: "set heuristically based on the average
nearest neighbor distance in the memory").

γ = 1 / mean d², where d is a key's distance to its nearest key of another example. Left out: the
key itself, keys of the same example, and keys that read the same tokens (templates share their
prefixes: zero distances that would drag the mean down). At that γ a neighbour at a typical
distance gives λ ≈ exp(-1).

Domains differ in how dense their keys lie. A memory of several has a γ for each, and one of all its
keys together, which configs scale.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.index.leave_one_out import search_leaving_out
from knn_moe.reference.provenance import Provenance

_SAMPLE: Final = 1024  # keys whose nearest neighbour is looked up: all, or this many evenly spaced
_CANDIDATES: Final = 4  # nearest keys looked at, so that exact repeats can be passed over


class Gammas(NamedTuple):
    """One layer's: of all its cases, and of each domain, where there are several."""

    joint: float
    domains: tuple[float, ...] = ()

    def ratio(self, where: Provenance) -> Tensor | None:
        """γ of each case's domain / γ of all; None: one γ serves all. Shape [M] fp32."""
        if not self.domains:
            return None
        ratios = torch.tensor(self.domains, dtype=torch.float64) / self.joint
        return ratios.float()[where.domain]


def estimate_gamma(
    keys: Tensor,
    example: Tensor,
    case: Tensor,
    device: torch.device | None = None,
    otherwise: float = 1.0,
) -> float:
    """γ of one layer, computed on `device` block by block: the keys may be a mapped file.

    Where every key is of one example, keys of the same example count; where no two keys differ,
    γ is `otherwise`, any kernel being as good.
    Shapes: keys [M, d]; example, case [M] int64, `case` equal for keys that are one case.
    """
    if len(keys) < 2:
        return otherwise
    count = min(_SAMPLE, len(keys))
    rows = torch.arange(count) * len(keys) // count
    alone = bool((example == example[0]).all())
    owner = torch.arange(len(keys)) if alone else example
    labels = [(label[rows], label) for label in (owner, case)]
    near, _ = search_leaving_out(keys[rows], keys, labels, _CANDIDATES, device or keys.device)
    nearest = near.masked_fill(near == 0, float("inf")).amin(dim=-1)
    found = nearest[nearest.isfinite()].double()
    return float(1 / found.mean()) if len(found) else otherwise


def estimate_by_domain(
    keys: Tensor,
    example: Tensor,
    case: Tensor,
    sizes: list[int],
    device: torch.device | None = None,
    joint: float = 1.0,
) -> tuple[float, ...]:
    """γ of each domain by its own keys, `sizes` of which follow each other; `joint` where no two of
    them differ. Empty where there is one domain. Shapes: as estimate_gamma's."""
    if len(sizes) == 1:
        return ()
    parts = zip(keys.split(sizes), example.split(sizes), case.split(sizes), strict=True)
    return tuple(estimate_gamma(*columns, device, joint) for columns in parts)
