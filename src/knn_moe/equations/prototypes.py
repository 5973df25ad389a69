"""A distilled memory: P prototypes of a layer, all of them recalled at once.

    s_j = exp(-γ ‖x - k_j‖²)             the similarity of prototype j, as in §4.2
    λ   = Σ_j s_j / (s_0 + Σ_j s_j)      the confidence
    r'  = r + λ (Σ_j s_j u_j / Σ_j s_j + W x)

The router takes part like one more prototype, of the constant similarity s_0: far from all
prototypes it decides alone. A prototype has no logits of its own but an update u_j of the router's,
and W is an update that is linear in the input. Pure torch.

Shapes: T tokens, P prototypes, N experts, width d.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prototype_confidence(log_similarity: Tensor, log_threshold: Tensor) -> Tensor:
    """Return λ = Σ_j s_j / (s_0 + Σ_j s_j), from log s [T, P] and log s_0 []. Result [T]."""
    return torch.sigmoid(log_similarity.logsumexp(dim=-1) - log_threshold)


def prototype_update(log_similarity: Tensor, updates: Tensor, linear: Tensor) -> Tensor:
    """Return Σ_j s_j u_j / Σ_j s_j + W x.

    Shapes: log_similarity [T, P]; updates [P, N]; linear = W x [T, N]. Result [T, N].
    """
    return torch.softmax(log_similarity, dim=-1) @ updates + linear
