"""Locally optimal expert assignments for one batch of token sequences (§4.1).

Teacher forcing on a frozen model. The routing logits of every token and layer become fp32 leaves
that start at xW; each of S steps runs the model with those logits in place, sums the token
losses, and moves all leaves at once: r ← r - η ∂L/∂r. One backward serves every token and layer;
it also carries a later token's loss into an earlier token's logits through attention.

Knows tensors and routers; nothing of text, files or similarity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knn_moe.config import BuildConfig
from knn_moe.errors import RouterNotCalledError
from knn_moe.reference.windows import TokenBatch
from knn_moe.routers.dense_gradients import DenseGradientHook
from knn_moe.routers.find import Router
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks


@dataclass(frozen=True)
class LayerCases:
    """What one layer learned from a batch, padding included. Shapes: [B·T, d], [B·T, N]."""

    inputs: Tensor
    logits: Tensor

    def detached(self) -> LayerCases:
        return LayerCases(self.inputs, self.logits.detach())


AfterStep: TypeAlias = Callable[[float, int, dict[int, LayerCases]], None]
Slopes: TypeAlias = Sequence[Tensor | None]


class RoutingLogits:
    """One layer's routing logits, as leaves the model runs on."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._inputs: Tensor | None = None
        self._own: Tensor | None = None
        self._leaf: Tensor | None = None

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        if self._leaf is None:
            # The first pass is the unmodified model: its router inputs are the keys.
            self._inputs = inputs.detach()
            self._own = self._leaf = logits.detach().float().requires_grad_()
        return self._leaf.to(logits.dtype)

    def restart(self) -> None:
        """From the router's own logits again."""
        self._leaf = self._own

    @property
    def cases(self) -> LayerCases:
        """The router inputs and the logits as they are now."""
        if self._inputs is None or self._leaf is None:
            raise RouterNotCalledError(
                f"Router {self.router.name!r} was never called. A quantised or fused block may go "
                f"around it: load the model without (for GPT-OSS: Mxfp4Config(dequantize=True))."
            )
        return LayerCases(self._inputs, self._leaf)

    def descend(self, slope: Tensor | None, learning_rate: float) -> None:
        """r ← r - η ∂L/∂r. No slope: no loss depends on these logits."""
        if slope is not None:
            self._leaf = (self.cases.logits.detach() - learning_rate * slope).requires_grad_()


def optimise_routing(
    model: nn.Module, routers: list[Router], batch: TokenBatch, config: BuildConfig
) -> dict[int, LayerCases]:
    """(router inputs, optimised logits) of every token, by layer (§4.1)."""
    return optimise_paths(model, routers, batch, config, [config.learning_rate])


def optimise_paths(
    model: nn.Module,
    routers: list[Router],
    batch: TokenBatch,
    config: BuildConfig,
    rates: Sequence[float],
    after_step: AfterStep = lambda rate, step, cases: None,
) -> dict[int, LayerCases]:
    """As optimise_routing, for each η of `rates`; what the last one led to. All of them begin where
    the model is: their first steps share one backward pass.

    `after_step` is handed η, the number of steps done, and the logits they led to.
    """
    layers = [RoutingLogits(router) for router in routers]
    hooks = [
        DenseGradientHook(model, layer.router, layer)
        if config.gradient == "dense"
        else RouterHook(layer.router, layer)
        for layer in layers
    ]
    with torch.inference_mode(False), torch.enable_grad(), install_hooks(hooks):
        first: Slopes = []
        if config.steps:
            first = _slopes(model, layers, batch)
        else:
            with torch.no_grad():
                summed_loss(model, batch)
        for rate in rates:
            for layer in layers:
                layer.restart()
            for step in range(1, config.steps + 1):
                slopes = first if step == 1 else _slopes(model, layers, batch)
                for layer, slope in zip(layers, slopes, strict=True):
                    layer.descend(slope, rate)
                after_step(rate, step, _cases(layers))
    return _cases(layers)


def _slopes(model: nn.Module, layers: Sequence[RoutingLogits], batch: TokenBatch) -> Slopes:
    loss = summed_loss(model, batch)
    leaves = [layer.cases.logits for layer in layers]
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def _cases(layers: Sequence[RoutingLogits]) -> dict[int, LayerCases]:
    return {layer.router.layer: layer.cases.detached() for layer in layers}


def summed_loss(model: nn.Module, batch: TokenBatch) -> Tensor:
    """L = Σ_t -log p(y_{t+1} | y_≤t) over the scored positions: a sum, since a mean would divide
    η by the number of tokens."""
    mask = batch.real.long() if batch.padded else None  # none: attention's fastest path
    output: Any = model(input_ids=batch.ids, attention_mask=mask, use_cache=False)
    logits = output.logits[:, :-1]
    targets = batch.ids[:, 1:].masked_fill(~batch.scored[:, :-1], -100)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
