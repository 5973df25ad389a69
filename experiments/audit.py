"""What a trained model became: its loss by domain, and how it uses its experts.

Knows models through transformers and the routers this project finds; nothing of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corpus import encode, read_texts, windows
from knn_moe.inference.expert_usage import count_experts
from knn_moe.tasks.likelihood import token_losses

_LENGTH = 256
_WINDOWS = 200  # of each domain


def held_out(tokenizer: Any, data: Path, domains: Sequence[str]) -> dict[str, Tensor]:
    """The first windows of each domain's validation text. Shapes: [W, length]."""
    found = {}
    for domain in domains:
        documents = encode(tokenizer, read_texts(data, domain, "valid"))
        found[domain] = windows(documents, _LENGTH)[:_WINDOWS].long()
    return found


def losses_by_domain(model: Any, tokens: Mapping[str, Tensor]) -> dict[str, float]:
    """Nats per token on each domain's windows."""
    return {
        domain: round(float(token_losses(model, part, 32).nll.mean()), 4)
        for domain, part in tokens.items()
    }


def audit_experts(model: Any, tokens: Mapping[str, Tensor]) -> dict[str, Any]:
    """How evenly the experts are used, and how their use differs between domains.

    `load` is each expert's share of all choices, layers × experts. `busiest` is the largest
    share over an even one, by layer. `divergence` is the Jensen-Shannon divergence (bits) of
    expert use between two domains, averaged over the layers: 0 where both use them alike.
    """
    uses = {domain: expert_use(model, part) for domain, part in tokens.items()}
    total = torch.stack(list(uses.values())).mean(dim=0)
    return {
        "load": [[round(share, 4) for share in row] for row in total.tolist()],
        "busiest": [round(float(row.max() * len(row)), 2) for row in total],
        "idlest": [round(float(row.min() * len(row)), 2) for row in total],
        "divergence": {
            one: {two: round(divergence(uses[one], uses[two]), 3) for two in uses} for one in uses
        },
    }


@torch.no_grad()
def expert_use(model: Any, tokens: Tensor) -> Tensor:
    """Each expert's share of the choices made. Shape [layers, experts], rows sum to 1."""
    with count_experts(model) as counts:
        for batch in tokens.split(32):
            model(batch.to(model.device), use_cache=False)
    shares = counts.shares()
    return shares / shares.sum(dim=-1, keepdim=True)


def divergence(one: Tensor, two: Tensor) -> float:
    """Jensen-Shannon divergence in bits, averaged over rows. Shapes: [layers, experts]."""
    middle = (one + two) / 2

    def relative(p: Tensor) -> Tensor:
        return torch.where(p > 0, p * (p / middle).log2(), 0.0).sum(dim=-1)

    return float(((relative(one) + relative(two)) / 2).mean())


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
