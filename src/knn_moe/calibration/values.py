"""Let each case's logits learn from the tokens that recall it.

Building makes a token's own loss small (§4.1), and nobody recalls a case in its own place. Here
the same step is taken for the others' loss: r ← r - η ∂L/∂r, where L is the loss of tokens of
other examples, routed by what they recall. What only one token wanted averages out; what all of
them lack is added. The kernels are fitted along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from knn_moe.calibration.fit import Cases, Studied, mixing, places, recalled_loss
from knn_moe.calibration.kernels import Kernels
from knn_moe.config import LayerKernel, RoutingConfig
from knn_moe.optimise import frozen

_KERNEL_RATE: Final = 0.03  # of Adam, falling to 0


def learn_values(
    model: nn.Module,
    cases: Sequence[Cases],
    studied: Studied,
    start: RoutingConfig,
    passes: int,
    rate: float,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[tuple[LayerKernel, ...], list[Cases]]:
    """Kernels from those of `start` on, and the cases with other values, after so many `passes`
    over the readings. `rate`: η, falling to 0."""
    device = cases[0].router.device
    steps = passes * len(studied.readings)
    with frozen(model), torch.enable_grad():
        learning = [replace(each, values=each.values.clone().requires_grad_()) for each in cases]
        gammas = {each.router.layer: each.gamma for each in cases}
        kernels = Kernels(gammas, device, start.kernels)
        adam = torch.optim.Adam(kernels.parameters(), lr=_KERNEL_RATE)
        leaves = [kernels.raw, *(each.values for each in learning)]
        with mixing(learning, kernels, start.k) as mixes:
            for step, place in enumerate(places(len(studied.readings), steps)):
                summed, count = recalled_loss(model, mixes, studied, place)
                slopes = torch.autograd.grad(summed, leaves)
                left = 1 - step / steps
                kernels.raw.grad = slopes[0] / count
                adam.param_groups[0]["lr"] = _KERNEL_RATE * left
                adam.step()
                with torch.no_grad():
                    for each, slope in zip(learning, slopes[1:], strict=True):
                        each.values.sub_(slope, alpha=rate * left)
                on_step()
    return kernels.found(), [replace(each, values=each.values.detach()) for each in learning]
