"""Locally optimal expert assignments for one batch of token sequences (§4.1).

Teacher forcing on a frozen model. The routing logits of every token and layer become fp32 leaves
that start at xW; each of S steps runs the model with those logits in place, sums the token losses,
and moves all leaves at once: r ← r - η ∂L/∂r. One backward pass serves every token and layer; it
also carries a later token's loss into an earlier token's logits through attention.

Knows tensors and routers; nothing of text, files or similarity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from knn_moe.config import BuildConfig
from knn_moe.equations.losses import next_token_losses
from knn_moe.errors import RouterNotCalledError
from knn_moe.reference.windows import Batch
from knn_moe.routers.dense_gradients import DenseGradientHook
from knn_moe.routers.find import Router
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks


@dataclass(frozen=True)
class OptimisedLayer:
    """The router inputs and optimised logits of one layer for all tokens of a batch, padding
    included. Shapes: inputs [B·T, d]; logits [B·T, N]."""

    inputs: Tensor
    logits: Tensor


Layers: TypeAlias = dict[int, OptimisedLayer]
Gradients: TypeAlias = Sequence[Tensor | None]


class RoutingLogits:
    """One layer's routing logits, as leaves that the model runs on."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._inputs = torch.empty(0)
        self._leaf: Tensor | None = None

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        if self._leaf is None:
            # The first pass is the unmodified model: its router inputs are the keys.
            self._inputs = inputs.detach()
            self._leaf = logits.detach().float().requires_grad_()
        return self._leaf.to(logits.dtype)

    @property
    def leaf(self) -> Tensor:
        """The logits as they are now. Shape [B·T, N]."""
        if self._leaf is None:
            raise RouterNotCalledError(
                f"Router {self.router.name!r} was never called. A quantised or fused block may "
                f"bypass it: load the model without it (GPT-OSS: Mxfp4Config(dequantize=True))."
            )
        return self._leaf

    def result(self) -> OptimisedLayer:
        """Return the router inputs and the logits as they are now."""
        return OptimisedLayer(self._inputs, self.leaf.detach())

    def descend(self, gradient: Tensor | None, learning_rate: float) -> None:
        """r ← r - η ∂L/∂r. No gradient: no loss depends on these logits."""
        if gradient is not None:
            self._leaf = (self.leaf.detach() - learning_rate * gradient).requires_grad_()


def optimise_routing(
    model: nn.Module, routers: list[Router], batch: Batch, config: BuildConfig
) -> Layers:
    """Return (router inputs, optimised logits) of every token, by layer (§4.1).

    Raises:
        RouterNotCalledError: The model bypasses a router.
    """
    layers = [RoutingLogits(router) for router in routers]
    hooks = [
        DenseGradientHook(model, layer.router, layer)
        if config.gradient == "dense"
        else RouterHook(layer.router, layer)
        for layer in layers
    ]
    with torch.inference_mode(False), torch.enable_grad(), install_hooks(hooks):
        if not config.steps:
            with torch.no_grad():
                summed_loss(model, batch)
        for _ in range(config.steps):
            for layer, gradient in zip(layers, _gradients(model, layers, batch), strict=True):
                layer.descend(gradient, config.learning_rate)
    return {layer.router.layer: layer.result() for layer in layers}


def _gradients(model: nn.Module, layers: Sequence[RoutingLogits], batch: Batch) -> Gradients:
    loss = summed_loss(model, batch)
    return torch.autograd.grad(loss, [layer.leaf for layer in layers], allow_unused=True)


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return L = Σ_t -log p(y_{t+1} | y_≤t) over the scored positions.

    A sum: a mean would divide η by the number of tokens.
    """
    return batch_losses(model, batch).sum()


def batch_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Run the model on a batch and return the loss of each token's next one, 0 where it does not
    count. Shape [B, T - 1] fp32, on the logits' device."""
    output: Any = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False)
    return next_token_losses(output.logits, batch.ids, batch.scored)
