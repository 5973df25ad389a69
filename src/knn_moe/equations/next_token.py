"""Mix the tokens that followed the nearest neighbours into a model's prediction (kNN-LM).

    p(y | x) = λ p_kNN(y | x) + (1 - λ) p_LM(y | x)
    p_kNN(y | x) ∝ Σ_i 1[y = v_i] exp(-d_i² / τ), over the K nearest neighbours

Khandelwal et al. (2020); τ is the temperature. A distance of inf stands for a neighbour that was
not found or that no token followed. Pure torch. Shapes: T tokens, K neighbours, V words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS: Final = tuple(tenth / 10 for tenth in range(10))  # values of λ to try
KS: Final = (16, 64, 256)  # values of K to try
# Values of τ to try, in units of the mean squared distance to the nearest neighbour.
TEMPERATURES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0)


class Mixture(NamedTuple):
    """K, λ and τ of a mixture, after the mean loss of the tokens that it was tried on."""

    loss: float
    k: int
    weight: float
    temperature: float


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


def likeliest_mixture(
    own: Tensor,
    squared_distance: Tensor,
    right: Tensor,
    ks: Sequence[int] = KS,
    temperatures: Sequence[float] | None = None,
    weights: Sequence[float] = WEIGHTS,
) -> Mixture:
    """Try every K, τ and λ on tokens whose neighbours were looked up once; return the likeliest.

    Args:
        own, squared_distance, right, weights: As in `mix_likelihoods`, nearest neighbours first.
        ks: The values of K, at most as many as there are neighbours.
        temperatures: The values of τ. None: those in proportion to the distances.
    """
    tried = []
    for k, temperature in product(ks, temperatures or scale_temperatures(squared_distance)):
        near = squared_distance[:, :k], right[:, :k]
        for weight, mixed in mix_likelihoods(own, *near, temperature, weights):
            tried.append(Mixture(-float(mixed.double().mean()), k, weight, temperature))
    return min(tried)


def scale_temperatures(squared_distance: Tensor) -> list[float]:
    """Return the values of τ to try. Distances of 0 do not count: texts of one template share
    beginnings. Shapes: squared_distance [T, K], nearest first."""
    nearest = squared_distance[:, 0]
    nearest = nearest[(nearest > 0) & nearest.isfinite()]
    unit = float(nearest.mean()) if len(nearest) else 1.0
    return [unit * factor for factor in TEMPERATURES]


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
