"""Let each case's logits learn from the tokens that recall it.

Building makes a token's own loss small (§4.1), and nobody recalls a case in its own place. Here
the logits descend the others' loss: that of tokens of other examples, routed by what they recall.
What only one token wanted averages out; what all of them lack is added. By Adam, whose steps are of
one size for all models: a case is recalled by few tokens or by many, and slopes are small or large.
The widths are fitted along. Slopes go through the experts they went through in the build: all of
them (dense), or those that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from knn_moe.adapt.calibrate.fit import Cases, Studied, mixing, places, recalled_loss
from knn_moe.adapt.calibrate.widths import DivergedError, WidthParameters
from knn_moe.config import LayerRouting, RoutingConfig
from knn_moe.routers.model_state import freeze

_WIDTH_RATE: Final = 0.03  # of Adam, falling to 0
_BETAS, _SMALLEST = (0.9, 0.99), 1e-12  # a value's slope of the mean loss may be as small as 1e-8


class Learning(NamedTuple):
    """So many `passes` over the readings; `rate`: of Adam, falling to 0."""

    passes: int
    rate: float
    gradient: str


def learn_values(
    model: nn.Module,
    cases: Sequence[Cases],
    studied: Studied,
    start: RoutingConfig,
    how: Learning,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[tuple[LayerRouting, ...], list[Cases]]:
    """Return the fitted widths and the cases with trained values. Raises DivergedError if the fit
    diverges."""
    device = cases[0].router.device
    steps = how.passes * len(studied.readings)
    rates = _WIDTH_RATE, how.rate
    with freeze(model), torch.enable_grad():
        learning = [replace(each, values=each.values.clone().requires_grad_()) for each in cases]
        gammas = {each.router.layer: each.gamma for each in cases}
        widths = WidthParameters(gammas, device, start.per_layer)
        values = [each.values for each in learning]
        groups: list[dict[str, Any]] = [{"params": [widths.raw]}, {"params": values}]
        adam = torch.optim.Adam(groups, betas=_BETAS, eps=_SMALLEST)
        dense = model if how.gradient == "dense" else None
        with mixing(learning, widths, start.k, dense) as mixes:
            for step, place in enumerate(places(len(studied.readings), steps)):
                summed, count = recalled_loss(model, mixes, studied, place)
                adam.zero_grad()
                (summed / count).backward()
                for group, most in zip(adam.param_groups, rates, strict=True):
                    group["lr"] = most * (1 - step / steps)
                adam.step()
                on_step()
    if not all(bool(each.values.isfinite().all()) for each in learning):
        raise DivergedError
    return widths.found(), [replace(each, values=each.values.detach()) for each in learning]
