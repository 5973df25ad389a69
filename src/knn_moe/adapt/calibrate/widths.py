"""Widths to fit: for every layer a width to weigh neighbours by, one to take λ by, and λ's factor;
and the update scale, a factor on the difference between a case's value and its router's own logits,
which is an η chosen afterwards for each layer.

Kept as logarithms and a logit, whose gradients have no bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.config import LayerRouting
from knn_moe.recall.leave_one_out import Cases
from knn_moe.recall.neighbours import Widths

START: Final = {"gamma_scale": 1.0, "confidence_scale": 0.1, "confidence_factor": 0.9}
_DIGITS: Final = 6
_LEAST: Final = 1e-6  # distance of a factor from 0 and 1, where its logit has no slope


class DivergedError(ArithmeticError):
    """The fit diverged: parameters or losses are not finite."""


class WidthParameters(nn.Module):
    """The widths of all layers as parameters.

    Args:
        gammas: Each layer's own γ, which the widths are relative to.
        device: Where the parameters are.
        start: Where to start; other layers start at START.
    """

    def __init__(
        self,
        gammas: Mapping[int, float],
        device: torch.device,
        start: Iterable[LayerRouting] = (),
    ) -> None:
        super().__init__()
        self.gammas = gammas
        self.place = {layer: place for place, layer in enumerate(gammas)}
        given = {one.layer: one for one in start}
        usual = {layer: LayerRouting(layer=layer, **START) for layer in gammas}
        raw = [_to_raw(given.get(layer, usual[layer])) for layer in gammas]
        # [layers, 3]: the widths' logarithms and the factor's logit; [layers]: a logarithm.
        self.raw = nn.Parameter(torch.tensor(raw).to(device))
        self.log_update_scale = nn.Parameter(torch.zeros(len(gammas), device=device))

    @classmethod
    def of(cls, cases: Sequence[Cases], start: Iterable[LayerRouting] = ()) -> WidthParameters:
        """Make the parameters of the layers that `cases` are of, on the first one's device."""
        gammas = {each.router.layer: each.gamma for each in cases}
        return cls(gammas, cases[0].router.device, start)

    def widths(self, layer: int, device: torch.device) -> Widths:
        """Return the widths of a layer, with gradients."""
        weight, wide, factor = self.raw[self.place[layer]].to(device)
        gamma = self.gammas[layer]
        return Widths(gamma * weight.exp(), gamma * wide.exp(), factor.sigmoid())

    def update_scale(self, layer: int) -> Tensor:
        """Return the update scale of a layer. Shape []."""
        return self.log_update_scale[self.place[layer]].exp()

    def rescale(self, layer: int, values: Tensor, own: Tensor) -> Tensor:
        """Move `values` away from, or towards, the router's own logits. Shapes: [..., N]."""
        return own + self.update_scale(layer).to(values.device) * (values - own)

    def read(self) -> tuple[LayerRouting, ...]:
        """Return the widths as they are now.

        Raises:
            DivergedError: They are not finite.
        """
        if not bool(self.raw.isfinite().all() and self.log_update_scale.isfinite().all()):
            raise DivergedError
        columns = [self.raw[:, 0].exp(), self.raw[:, 1].exp(), self.raw[:, 2].sigmoid()]
        rows = torch.stack(columns, dim=1).tolist()
        return tuple(
            LayerRouting(
                layer=layer,
                gamma_scale=_round(weight),
                confidence_scale=_round(wide),
                confidence_factor=_round(factor),
            )
            for layer, (weight, wide, factor) in zip(self.gammas, rows, strict=True)
        )


def _round(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def _to_raw(start: LayerRouting) -> list[float]:
    factor = min(max(start.confidence_factor, _LEAST), 1 - _LEAST)
    return [
        math.log(start.gamma_scale),
        math.log(start.confidence_scale),
        math.log(factor / (1 - factor)),
    ]
