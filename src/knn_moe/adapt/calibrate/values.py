"""Train each case's values on the tokens that recall it.

Building makes a token's own loss small (§4.1), but nobody recalls a case in its own place. Here the
values descend the loss of tokens of other examples, routed by what they recall: what only one token
wanted averages out, what all of them lack is added. Trained by Adam, whose steps have one size for
all models, however often a case is recalled. The widths are fitted along. Gradients go through the
experts they went through in the build: all of them (dense), or those that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from knn_moe.adapt.calibrate.fit import (
    FitCases,
    FitData,
    batch_order,
    install_fitted_recall,
    mean_loss,
)
from knn_moe.adapt.calibrate.widths import DivergedError, WidthParameters
from knn_moe.config import LayerRouting, RoutingConfig
from knn_moe.routers.model_state import freeze

_WIDTH_RATE: Final = 0.03  # of Adam, falling to 0
_BETAS, _SMALLEST = (0.9, 0.99), 1e-12  # a value's gradient may be as small as 1e-8


class ValueTraining(NamedTuple):
    """How values are trained: passes over the batches, Adam's rate (falling to 0), gradient."""

    passes: int
    rate: float
    gradient: str


def train_values(
    model: nn.Module,
    cases: Sequence[FitCases],
    data: FitData,
    start: RoutingConfig,
    training: ValueTraining,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[tuple[LayerRouting, ...], list[FitCases]]:
    """Return the fitted widths and the cases with trained values.

    Raises:
        DivergedError: The training diverged.
    """
    steps = training.passes * len(data.batches)
    rates = _WIDTH_RATE, training.rate
    with freeze(model), torch.enable_grad():
        trained = [replace(each, values=each.values.clone().requires_grad_()) for each in cases]
        gammas = {each.router.layer: each.gamma for each in cases}
        parameters = WidthParameters(gammas, cases[0].router.device, start.per_layer)
        values = [each.values for each in trained]
        groups: list[dict[str, Any]] = [{"params": [parameters.raw]}, {"params": values}]
        adam = torch.optim.Adam(groups, betas=_BETAS, eps=_SMALLEST)
        dense = model if training.gradient == "dense" else None
        with install_fitted_recall(trained, parameters, start.k, dense) as recalls:
            for step, place in enumerate(batch_order(len(data.batches), steps)):
                adam.zero_grad()
                mean_loss(model, recalls, data, place).backward()
                for group, most in zip(adam.param_groups, rates, strict=True):
                    group["lr"] = most * (1 - step / steps)
                adam.step()
                on_step()
    if not all(bool(each.values.isfinite().all()) for each in trained):
        raise DivergedError
    return parameters.read(), [replace(each, values=each.values.detach()) for each in trained]
