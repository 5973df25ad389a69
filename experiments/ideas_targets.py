"""Other ways down the same slope: what a case says, for ideas.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knn_moe import find_routers
from knn_moe.build.optimise import RoutingLogits
from knn_moe.reference.windows import TokenBatch
from knn_moe.routers.dense_gradients import ChooseAll, dense_gradient
from knn_moe.routers.intercept import ReplaceLogits, RouterHook
from knn_moe.routers.model_state import install_hooks

STEPS, RATE = 5, 2.0
_LENGTHS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # of a line search
Ask = Callable[[list[Tensor]], Tensor]
# Logits by layer, their slopes, each token's own loss, and how to ask for it elsewhere → logits.
Step = Callable[[list[Tensor], list[Tensor], Tensor, Ask], list[Tensor]]


def descend(model: nn.Module, batch: TokenBatch, step: Step) -> list[Tensor]:
    """Every token's logits after STEPS steps, by layer [B·T, N]; optimise.py's but for `step`."""
    layers = [RoutingLogits(router) for router in find_routers(model)]
    soft = step is softly
    hooks = [
        SoftTopK(layer.router, layer) if soft else dense_gradient(model, layer.router, layer)
        for layer in layers
    ]

    def put(moved: list[Tensor]) -> None:
        for layer, leaf in zip(layers, moved, strict=True):
            layer._leaf = leaf.requires_grad_()

    @torch.no_grad()
    def ask(moved: list[Tensor]) -> Tensor:
        before = [layer._leaf for layer in layers]
        put(moved)
        own = own_losses(model, batch)
        for layer, leaf in zip(layers, before, strict=True):
            layer._leaf = leaf
        return own

    with torch.enable_grad(), install_hooks(hooks):
        for _ in range(STEPS):
            own = own_losses(model, batch)
            leaves = [layer.cases.logits for layer in layers]
            slopes = torch.autograd.grad(own.sum(), leaves)
            put(step([leaf.detach() for leaf in leaves], list(slopes), own.detach(), ask))
    return [layer.cases.logits.detach() for layer in layers]


def own_losses(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Each token's loss, 0 where it has none [B·T]."""
    mask = batch.real.long() if batch.padded else None
    logits = model(input_ids=batch.ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    targets = batch.ids[:, 1:].masked_fill(~batch.scored[:, :-1], -100)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return F.pad(loss.view(targets.shape), (0, 1)).flatten()


class SoftTopK(RouterHook):
    """All experts run, weighed as the router would if it chose all of them."""

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        super().after(module, args, kwargs, output)
        if output is None:
            return None
        with ReplaceLogits(self.router, self.callback), ChooseAll(self.router):
            return module.forward(*args, **kwargs)


def plain(logits: list[Tensor], slopes: list[Tensor], own: Tensor, ask: Ask) -> list[Tensor]:
    """r - η ∂L/∂r."""
    return [one - RATE * slope for one, slope in zip(logits, slopes, strict=True)]


def longer(logits: list[Tensor], slopes: list[Tensor], own: Tensor, ask: Ask) -> list[Tensor]:
    """η = 5."""
    return [one - 5.0 * slope for one, slope in zip(logits, slopes, strict=True)]


def normalised(logits: list[Tensor], slopes: list[Tensor], own: Tensor, ask: Ask) -> list[Tensor]:
    """Each token's step in each layer is as long as the others': a confidence_factor region of 0.3."""
    return [
        one - 0.3 * slope / slope.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        for one, slope in zip(logits, slopes, strict=True)
    ]


def clipped(logits: list[Tensor], slopes: list[Tensor], own: Tensor, ask: Ask) -> list[Tensor]:
    """No step is longer than 0.5."""
    steps = [RATE * slope for slope in slopes]
    lengths = [step.norm(dim=-1, keepdim=True).clamp(min=1e-12) for step in steps]
    shrink = [(0.5 / length).clamp(max=1) for length in lengths]
    return [one - step * less for one, step, less in zip(logits, steps, shrink, strict=True)]


def signs(logits: list[Tensor], slopes: list[Tensor], own: Tensor, ask: Ask) -> list[Tensor]:
    """Adam's first step, again and again: the slope's signs, of a size."""
    return [one - 0.1 * slope.sign() for one, slope in zip(logits, slopes, strict=True)]


def until_right(logits: list[Tensor], slopes: list[Tensor], own: Tensor, ask: Ask) -> list[Tensor]:
    """Tokens that are right already (p > 0.5) stay where they are."""
    wrong = (own > 0.6931).float()[:, None]
    return [one - RATE * wrong * slope for one, slope in zip(logits, slopes, strict=True)]


def searched(logits: list[Tensor], slopes: list[Tensor], own: Tensor, ask: Ask) -> list[Tensor]:
    """Each token goes as far along its slope as its own loss falls."""
    best, far = own, torch.zeros_like(own)
    for length in _LENGTHS[1:]:
        asked = ask([one - length * slope for one, slope in zip(logits, slopes, strict=True)])
        far = torch.where(asked < best, length, far)
        best = torch.minimum(asked, best)
    return [one - far[:, None] * slope for one, slope in zip(logits, slopes, strict=True)]


def softly(logits: list[Tensor], slopes: list[Tensor], own: Tensor, ask: Ask) -> list[Tensor]:
    """Plain steps of a model that runs all experts (SoftTopK)."""
    return plain(logits, slopes, own, ask)


TARGETS: dict[str, Step] = {
    "plain": plain,
    "longer steps": longer,
    "normalised steps": normalised,
    "clipped steps": clipped,
    "signs": signs,
    "until right": until_right,
    "line search": searched,
    "soft top-k": softly,
}
