"""Train the cases' values on the tokens that recall them.

Building makes a token's own loss small (§4.1), but nobody recalls a case in its own place. Here the
values descend the loss of tokens of other examples, routed by what they recall: what only one token
wanted averages out, what all of them lack is added. Two things are trained: a value for each case,
and for each layer one linear map of the keys, which is added to all values. The map learns from
every token what all cases have in common, as tuning the router would; a case's own value adds what
is particular to its neighbourhood. In the end the map is written into the values, and is gone.

Adam's steps have one size however often a case is recalled. That size is relative to the spread of
the layer's logits, so a router whose logits are small is moved in small steps. The widths are
fitted along. Gradients go through the experts they went through in the build: all of them (dense),
or those that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

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
# A step of the map moves a key's logits by at most this many times what a step of its value does.
_LINEAR: Final = 4.0
_BETAS, _SMALLEST = (0.9, 0.99), 1e-12  # a value's gradient may be as small as 1e-8
_ROWS: Final = 1 << 16  # cases that the map is written into at a time


class ValueTraining(NamedTuple):
    """How values are trained: passes over the batches, the rate relative to each layer's spread
    (falling to 0), the gradient, and the spread of each layer's logits."""

    passes: int
    rate: float
    gradient: str
    spreads: Sequence[float]


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
    with freeze(model), torch.enable_grad():
        trained = [_make_trainable(each) for each in cases]
        parameters = WidthParameters.of(cases, start.per_layer)
        groups: list[dict[str, Any]] = [{"params": [parameters.raw], "most": _WIDTH_RATE}]
        for each, spread in zip(trained, training.spreads, strict=True):
            rate = training.rate * spread
            groups.append({"params": [each.values], "most": rate})
            groups.append({"params": [each.linear], "most": _LINEAR * rate / _length(each.keys)})
        # On a GPU, fused: one kernel launch per tensor instead of about a dozen.
        fused = cases[0].keys.is_cuda or None
        adam = torch.optim.Adam(groups, betas=_BETAS, eps=_SMALLEST, fused=fused)
        dense = model if training.gradient == "dense" else None
        with install_fitted_recall(trained, parameters, start.k, dense) as recalls:
            for step, place in enumerate(batch_order(len(data.batches), steps)):
                adam.zero_grad()
                mean_loss(model, recalls, data, place).backward()
                for group in adam.param_groups:
                    group["lr"] = group["most"] * (1 - step / steps)
                adam.step()
                on_step()
    written = [_write_map(each) for each in trained]
    if not all(bool(each.values.isfinite().all()) for each in written):
        raise DivergedError
    return parameters.read(), written


def _make_trainable(cases: FitCases) -> FitCases:
    shape = cases.values.shape[1], cases.keys.shape[1]
    linear = torch.zeros(shape, device=cases.values.device).requires_grad_()
    return replace(cases, values=cases.values.clone().requires_grad_(), linear=linear)


def _length(keys: Tensor) -> float:
    """Return the mean Σ|x| of the keys: how far a step of 1 in every weight moves a logit."""
    return max(float(keys[:_ROWS].float().abs().sum(dim=-1).mean()), 1e-12)


@torch.no_grad()
def _write_map(cases: FitCases) -> FitCases:
    """Add what the linear map makes of each key to the case's value, and drop the map."""
    assert cases.linear is not None
    values = cases.values.detach()
    for part, keys in zip(values.split(_ROWS), cases.keys.split(_ROWS), strict=True):
        part += keys.float() @ cases.linear.T
    return replace(cases, values=values, linear=None)
