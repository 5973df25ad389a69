"""Mix the tokens that followed the nearest neighbours into a model's prediction (kNN-LM).

    p(y | x) = λ p_kNN(y | x) + (1 - λ) p_LM(y | x)
    p_kNN(y | x) ∝ Σ_i 1[y = v_i] exp(-d_i² / τ), over the K nearest neighbours

Khandelwal et al. (2020); τ is the temperature. A distance of inf stands for a neighbour that was
not found or that no token followed. Pure torch. Shapes: T tokens, K neighbours, V words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS: Final = tuple(tenth / 10 for tenth in range(10))  # values of λ to try


def distance_weights(squared_distance: Tensor, temperature: float) -> Tensor:
    """Return exp(-d² / τ), scaled to sum to 1 in each row; all 0 if no neighbour was found.

    Shapes: squared_distance [T, K]. Result [T, K].
    """
    return torch.softmax(-squared_distance / temperature, dim=-1).nan_to_num(0.0)


def mix_next_token(
    logits: Tensor, squared_distance: Tensor, tokens: Tensor, weight: float, temperature: float
) -> Tensor:
    """Return log p(y | x) of the mixture.

    In fp32: bf16 is too coarse for small probabilities.

    Shapes: logits [T, V]; squared_distance and tokens, those that followed, [T, K]. Result [T, V].
    """
    mass, tokens = sum_by_token(distance_weights(squared_distance, temperature), tokens)
    result = F.log_softmax(logits.float(), dim=-1)
    result = result + _log_rest(squared_distance, weight)[:, None]
    mixed = torch.logaddexp(result.gather(1, tokens), (weight * mass).log())
    return result.scatter(1, tokens, mixed)


def mix_likelihoods(
    own: Tensor,
    squared_distance: Tensor,
    right: Tensor,
    temperature: float,
    weights: Sequence[float] = WEIGHTS,
) -> Iterator[tuple[float, Tensor]]:
    """Yield each λ of `weights` with log p(y | x) of the tokens that did follow.

    Args:
        own: Their log-probability by the model alone. Shape [T].
        squared_distance: d² of the neighbours. Shape [T, K].
        right: Whether the same token followed a neighbour. Shape [T, K] bool.
        temperature: τ.
        weights: The values of λ.

    Yields:
        λ, and log p(y | x) [T].
    """
    share = (distance_weights(squared_distance, temperature) * right).sum(dim=-1)
    for weight in weights:
        rest = _log_rest(squared_distance, weight)
        yield weight, torch.logaddexp(rest + own, (weight * share).log())


def _log_rest(squared_distance: Tensor, weight: float) -> Tensor:
    """Return log(1 - λ), or 0 where no neighbour was found. Shapes: [T, K] → [T]."""
    found = squared_distance.isfinite().any(dim=-1)
    return torch.where(found, math.log1p(-weight), 0.0)


def sum_by_token(weights: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed weight of each token, repeated for its repetitions, and the sorted tokens.

    The sums are taken in fp64, so that the order of additions on a GPU makes no difference in fp32.

    Shapes: weights, tokens [T, K]. Result [T, K] fp32, [T, K] int64.
    """
    tokens, order = tokens.sort(dim=-1)
    run = F.pad((tokens.diff(dim=-1) != 0).cumsum(dim=-1), (1, 0))
    total = torch.zeros_like(weights, dtype=torch.float64)
    total.scatter_add_(1, run, weights.double().gather(1, order))
    return total.gather(1, run).float(), tokens
