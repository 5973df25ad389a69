"""Widths to fit: for every layer a width to weigh neighbours by, one to take λ by, and λ's factor;
and how much is made of what the build changed, an η for each layer that is chosen afterwards.

As logarithms and a logit, whose gradients know no bounds. Pure torch but for the configs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.config import LayerRouting
from knn_moe.equations.mixing import confidence, mix_logits, propose_logits

START: Final = {"gamma_scale": 1.0, "confidence_scale": 0.1, "confidence_factor": 0.9}
_DIGITS: Final = 6
_LEAST: Final = 1e-6  # that a confidence_factor is from 0 and 1, whose logits have no slope


class DivergedError(ArithmeticError):
    """A fit went to where numbers end: what it was trying is no use."""


class WidthParameters(nn.Module):
    """Of all layers at once. `gammas`: each layer's own γ, which the widths are relative to."""

    def __init__(
        self,
        gammas: Mapping[int, float],
        device: torch.device,
        start: Iterable[LayerRouting] | None = None,
    ) -> None:
        super().__init__()
        self.gammas = gammas
        self.place = {layer: place for place, layer in enumerate(gammas)}
        given = {kernel.layer: kernel for kernel in start or ()}
        usual = {layer: LayerRouting(layer=layer, **START) for layer in gammas}
        raw = [_raw(given.get(layer, usual[layer])) for layer in gammas]
        # [layers, 3]: the widths' logarithms and the factor's logit; [layers]: a logarithm.
        self.raw = nn.Parameter(torch.tensor(raw).to(device))
        self.update_scale = nn.Parameter(torch.zeros(len(gammas), device=device))

    def mix(self, layer: int, squared_distance: Tensor, values: Tensor, logits: Tensor) -> Tensor:
        """§4.2, with gradients for the widths.

        Shapes: squared_distance [T, K]; values [T, K, N]; logits [T, N] → [T, N].
        """
        weight, wide, confidence_factor = self.raw[self.place[layer]].to(logits.device)
        gamma = self.gammas[layer]
        proposal = propose_logits(values, -gamma * weight.exp() * squared_distance)
        mean = confidence(-gamma * wide.exp() * squared_distance)
        return mix_logits(logits.float(), proposal, confidence_factor.sigmoid() * mean).to(
            logits.dtype
        )

    def rescaled(self, layer: int, values: Tensor, own: Tensor) -> Tensor:
        """`values` farther from, or nearer to, the router's `own` for the same inputs. [..., N]."""
        return own + self.update_scale[self.place[layer]].exp().to(values.device) * (values - own)

    def found(self) -> tuple[LayerRouting, ...]:
        """As they are now. Raises DivergedError where a fit has led nowhere."""
        if not bool(self.raw.isfinite().all() and self.update_scale.isfinite().all()):
            raise DivergedError
        numbers = torch.stack(
            [self.raw[:, 0].exp(), self.raw[:, 1].exp(), self.raw[:, 2].sigmoid()], dim=1
        )
        return tuple(
            LayerRouting(
                layer=layer,
                gamma_scale=float(f"{weight:.{_DIGITS}g}"),
                confidence_scale=float(f"{wide:.{_DIGITS}g}"),
                confidence_factor=float(f"{confidence_factor:.{_DIGITS}g}"),
            )
            for layer, (weight, wide, confidence_factor) in zip(
                self.gammas, numbers.tolist(), strict=True
            )
        )


def _raw(start: LayerRouting) -> list[float]:
    confidence_factor = min(max(start.confidence_factor, _LEAST), 1 - _LEAST)
    return [
        math.log(start.gamma_scale),
        math.log(start.confidence_scale),
        math.log(confidence_factor / (1 - confidence_factor)),
    ]
