"""The kernel width γ from a memory's own distances (§5.1: "set heuristically based on the average
nearest neighbor distance in the memory").

γ = 1 / mean d², where d is a key's distance to its nearest key of another example. Left out are the
key itself, keys of the same example, and keys that read the same tokens: templates share prefixes,
whose zero distances would drag the mean down. At that γ a neighbour at a typical distance gives
λ ≈ exp(-1).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from knn_moe.index.exact import spread_evenly
from knn_moe.index.leave_one_out import search_leaving_out
from knn_moe.reference.provenance import Provenance

_SAMPLE: Final = 1024  # keys whose nearest neighbour is looked up: all, or this many evenly spaced
_CANDIDATES: Final = 4  # nearest keys looked at, so that exact repeats can be passed over


def estimate_gammas(
    keys: Mapping[int, Tensor], provenance: Provenance, device: torch.device | None = None
) -> dict[int, float]:
    """Return γ of each layer.

    Args:
        keys: By layer [M, d], which may be mapped files.
        provenance: Which example each key is of, and which keys read the same tokens.
        device: Where distances are computed. None: where the keys are.
    """
    example, case = provenance.example, provenance.prefix_hash()
    # On a CPU one layer at a time keeps every core busy; a GPU waits for its keys to arrive.
    workers = 8 if device is not None and device.type == "cuda" else 1
    with ThreadPoolExecutor(max_workers=workers) as pool:
        found = pool.map(lambda part: estimate_gamma(part, example, case, device), keys.values())
        return dict(zip(keys, found, strict=True))


def estimate_gamma(
    keys: Tensor, example: Tensor, case: Tensor, device: torch.device | None = None
) -> float:
    """Return γ of one layer, computed on `device` block by block.

    Where every key is of one example, keys of the same example count; where no two keys differ,
    γ is 1, since any width serves.
    Shapes: keys [M, d]; example, case [M] int64, `case` equal for keys that are one case.
    """
    if len(keys) < 2:
        return 1.0
    rows = spread_evenly(_SAMPLE, len(keys))
    one_example = bool((example == example[0]).all())
    owner = torch.arange(len(keys)) if one_example else example
    labels = [(label[rows], label) for label in (owner, case)]
    near, _ = search_leaving_out(keys[rows], keys, labels, _CANDIDATES, device or keys.device)
    nearest = near.masked_fill(near == 0, float("inf")).amin(dim=-1)
    finite = nearest[nearest.isfinite()].double()
    return float(1 / finite.mean()) if len(finite) else 1.0
