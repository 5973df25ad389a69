"""Measure a trained model: its loss on each domain, and how it uses its experts.

Shared by `train.py` and the tests; not a script of its own. It finds routers through knn_moe and
knows nothing about training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.inference.expert_usage import count_experts
from knn_moe.tasks.likelihood import token_losses

_BATCH: Final = 32  # windows in a forward pass


def losses_by_domain(model: Any, windows: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean loss on each domain's windows, in nats per token."""
    return {
        domain: round(float(token_losses(model, part, _BATCH).nll.mean()), 4)
        for domain, part in windows.items()
    }


def describe_expert_balance(model: Any, windows: Mapping[str, Tensor]) -> dict[str, Any]:
    """Describe how evenly the experts are used, and how their use differs between domains.

    Returns:
        `load`: each expert's share of all choices, layers × experts. `busiest` and `idlest`: the
        largest and the smallest share of each layer, divided by an even share. `divergence`: the
        Jensen-Shannon divergence of expert use between two domains, in bits, averaged over layers.
    """
    shares = {domain: expert_shares(model, part) for domain, part in windows.items()}
    mean = torch.stack(list(shares.values())).mean(dim=0)
    return {
        "load": [[round(share, 4) for share in row] for row in mean.tolist()],
        "busiest": [round(float(row.max() * len(row)), 2) for row in mean],
        "idlest": [round(float(row.min() * len(row)), 2) for row in mean],
        "divergence": {
            one: {two: round(divergence(shares[one], shares[two]), 3) for two in shares}
            for one in shares
        },
    }


@torch.no_grad()
def expert_shares(model: Any, windows: Tensor) -> Tensor:
    """Count each expert's share of the choices. Shape: [layers, experts]; rows sum to 1."""
    with count_experts(model) as counts:
        for batch in windows.split(_BATCH):
            model(batch.to(model.device), use_cache=False)
    shares = counts.shares()
    return shares / shares.sum(dim=-1, keepdim=True)


def divergence(one: Tensor, two: Tensor) -> float:
    """Return the Jensen-Shannon divergence in bits, averaged over layers.

    Shapes: [layers, experts].
    """
    middle = (one + two) / 2

    def relative_entropy(p: Tensor) -> Tensor:
        return torch.where(p > 0, p * (p / middle).log2(), 0.0).sum(dim=-1)

    return float(((relative_entropy(one) + relative_entropy(two)) / 2).mean())
