"""Confidence-aware adaptive mixing: the equations of §4.2, one function each. Pure torch.

T tokens, K neighbours, N experts. Similarities come as logarithms (similarity.py).
"""

from __future__ import annotations

import torch
from torch import Tensor


def neighbour_weights(log_similarity: Tensor) -> Tensor:
    """Return each neighbour's share of the proposal, s_j / Σ_m s_m  (§4.2).

    Computed as a softmax of log s, which gives the same ratios even if every s underflows.

    Shapes: log_similarity [T, K]. Result [T, K].
    """
    lowest = torch.finfo(log_similarity.dtype).min
    return torch.softmax(log_similarity.clamp(min=lowest), dim=-1)


def propose_logits(values: Tensor, weights: Tensor) -> Tensor:
    """Return the memory's proposal r_mem = Σ_j w_j v_j, with w_j = s_j / Σ_m s_m  (§4.2).

    Shapes: values [T, K, N]; weights [T, K]. Result [T, N].
    """
    return (weights[:, :, None] * values).sum(dim=1)


def confidence(log_similarity: Tensor) -> Tensor:
    """Return the confidence λ = (1/K) Σ_j s_j, the neighbours' mean similarity  (§4.2).

    Shapes: log_similarity [T, K]. Result [T], in [0, 1].
    """
    return log_similarity.exp().mean(dim=-1).clamp(0, 1)


def mix_logits(logits: Tensor, proposal: Tensor, confidence: Tensor) -> Tensor:
    """Interpolate router and memory logits: (1 - λ) r + λ r_mem  (§4.2).

    λ = 0 gives `logits` and λ = 1 gives `proposal`, exactly.

    Shapes: logits, proposal [T, N]; confidence [T]. Result [T, N].
    """
    weight = confidence[:, None]
    return (1 - weight) * logits + weight * proposal
