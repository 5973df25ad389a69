"""What followed the nearest of some stored tokens, mixed with a model's own prediction (kNN-LM).

    p(y | x) = λ p_kNN(y | x) + (1 - λ) p_LM(y | x)
    p_kNN(y | x) ∝ Σ_i 1[y = v_i] exp(-d_i² / T), over the K nearest

Khandelwal et al. (2020). Distances of inf are of tokens that were not found, or that nothing
followed. Pure torch. Shapes: T tokens, K neighbours, V words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS: Final = tuple(tenth / 10 for tenth in range(10))  # λ to try; 0: nothing stored helps


def shares(squared_distance: Tensor, temperature: float) -> Tensor:
    """exp(-d²/T), each row summing to 1, or all 0 if nothing was found. Shapes: [T, K] → [T, K]."""
    return torch.softmax(-squared_distance / temperature, dim=-1).nan_to_num(0.0)


def mix_next(
    logits: Tensor, squared_distance: Tensor, tokens: Tensor, weight: float, temperature: float
) -> Tensor:
    """Log-probabilities, their softmax being the mixture. In fp32: tokens of small probability have
    none to spare in bf16. Shapes: logits [T, V]; squared_distance, tokens [T, K] → [T, V]."""
    mass, tokens = summed(shares(squared_distance, temperature), tokens)
    result = F.log_softmax(logits.float(), dim=-1)
    result = result + _log_rest(squared_distance, weight)[:, None]
    told = torch.logaddexp(result.gather(1, tokens), (weight * mass).log())
    return result.scatter(1, tokens, told)


def mixed_likelihoods(
    own: Tensor,
    squared_distance: Tensor,
    right: Tensor,
    temperature: float,
    weights: Sequence[float] = WEIGHTS,
) -> Iterator[tuple[float, Tensor]]:
    """Each λ of `weights`, and log p of the tokens that came next.

    Shapes: own [T], log p by the model; right [T, K] bool, whether a neighbour had the same → [T].
    """
    share = (shares(squared_distance, temperature) * right).sum(dim=-1)
    for weight in weights:
        rest = _log_rest(squared_distance, weight)
        yield weight, torch.logaddexp(rest + own, (weight * share).log())


def _log_rest(squared_distance: Tensor, weight: float) -> Tensor:
    """log(1 - λ), what the model keeps; all, where no neighbour was found. Shapes: [T, K] → [T]."""
    found = squared_distance.isfinite().any(dim=-1)
    return torch.where(found, math.log1p(-weight), 0.0)


def summed(weights: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Σ of the weights of each token, told at every place where it stands, and the tokens in
    order. In fp64, where the order of additions, which a GPU leaves open, is not seen in fp32.

    Shapes: weights, tokens [T, K] → [T, K] fp32, [T, K] int64.
    """
    tokens, order = tokens.sort(dim=-1)
    run = F.pad((tokens.diff(dim=-1) != 0).cumsum(dim=-1), (1, 0))
    total = torch.zeros_like(weights, dtype=torch.float64)
    total.scatter_add_(1, run, weights.double().gather(1, order))
    return total.gather(1, run).float(), tokens
