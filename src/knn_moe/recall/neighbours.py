"""Recall (§4.2), once for everybody: given the nearest cases of some router inputs, weigh them,
take λ from them, and mix what they propose into the router's own logits.

Whoever recalls brings the search: an index (layer.py), or every example but the token's own
(leave_one_out.py). Tensors in, tensors out; gradients flow through values and widths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knn_moe.config import RoutingConfig
from knn_moe.equations.mixing import confidence, mix_logits, neighbour_weights, propose_logits
from knn_moe.equations.similarity import SIMILARITIES, Similarity


class Neighbours(NamedTuple):
    """The K nearest cases of T router inputs, nearest first.

    Shapes: squared_distance [T, K] fp32, inf where fewer were found; rows [T, K] int64, of the
    memory or of whatever the search looks in.
    """

    squared_distance: Tensor
    rows: Tensor

    def first(self, k: int) -> Neighbours:
        """Keep the k nearest."""
        return Neighbours(self.squared_distance[:, :k], self.rows[:, :k])


class Widths(NamedTuple):
    """The kernel widths of one layer, as numbers or as tensors that are being fitted."""

    gamma: float | Tensor  # where neighbours are weighed
    confidence_gamma: float | Tensor  # where λ is taken from them
    confidence_factor: float | Tensor = 1.0  # multiplies λ

    @classmethod
    def of(cls, gamma: float, layer: int, config: RoutingConfig) -> Widths:
        """Return the widths that `config` makes of a layer's γ; a γ in the config comes first."""
        own, largest = config.for_layer(layer), torch.finfo(torch.float32).max
        if not SIMILARITIES[config.similarity].uses_gamma:
            return cls(1.0, 1.0, own.confidence_factor)
        gamma = config.gamma or gamma
        return cls(
            min(gamma * own.gamma_scale, largest),
            min(gamma * own.confidence_scale, largest),
            own.confidence_factor,
        )


class Recalled(NamedTuple):
    """What T router inputs recall. Shapes: values [T, K, N]; weights [T, K]; confidence [T]."""

    values: Tensor
    weights: Tensor
    confidence: Tensor

    def spare(self, tokens: Tensor | None) -> Recalled:
        """Leave some tokens to the router: their λ becomes 0. Shapes: tokens [T] bool."""
        if tokens is None:
            return self
        confidence = self.confidence.masked_fill(tokens.to(self.confidence.device), 0.0)
        return self._replace(confidence=confidence)

    @property
    def proposal(self) -> Tensor:
        """r_mem, the logits that the neighbours propose. Shape [T, N]."""
        return propose_logits(self.values, self.weights)

    def mix(self, logits: Tensor) -> Tensor:
        """Mix the proposal into the router's own logits, as far as λ says. Shapes: [T, N]."""
        return mix_logits(logits.float(), self.proposal, self.confidence).to(logits.dtype)


def weigh(
    squared_distance: Tensor, values: Tensor, widths: Widths, similarity: Similarity
) -> Recalled:
    """Weigh neighbours by their similarity and take λ from it.

    Shapes: squared_distance [T, K]; values [T, K, N].
    """
    return Recalled(
        values,
        weights_of(squared_distance, widths, similarity),
        confidence_of(squared_distance, widths, similarity),
    )


def weights_of(squared_distance: Tensor, widths: Widths, similarity: Similarity) -> Tensor:
    """Return each neighbour's share of the proposal. Shapes: [T, K] → [T, K]."""
    return neighbour_weights(similarity.log(squared_distance, _tensor(widths.gamma)))


def confidence_of(squared_distance: Tensor, widths: Widths, similarity: Similarity) -> Tensor:
    """Return λ of each token. Shapes: [T, K] → [T], in [0, 1]."""
    mean = confidence(similarity.log(squared_distance, _tensor(widths.confidence_gamma)))
    return widths.confidence_factor * mean


def _tensor(width: float | Tensor) -> Tensor:
    return width if isinstance(width, Tensor) else torch.tensor(width, dtype=torch.float32)
