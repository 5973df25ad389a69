"""Straight-through gradients to the routing logits of all experts, not only the chosen ones.

Forward is the sparse model's own: Σ_{top-k} a_j E_j(x). Backward sends every logit its gradient
through Σ_j p_j E_j(x.detach()), where p is the router's own gating with k = N. Costs N / top_k
times the expert arithmetic. Under gatings that renormalise the chosen experts (Qwen3, GPT-OSS)
the plain, sparse gradient of all other logits is exactly zero.

Knows that an MoE block calls `experts(hidden_states, indices, weights)`; families that don't are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from knn_moe.errors import UnsupportedModelError
from knn_moe.intercept import Callback, ReplaceLogits, RouterHook
from knn_moe.routers import Router, block_of


class ChooseAll(TorchFunctionMode):
    """While active, a top-k of the router's choice over its experts picks all of them."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in (torch.topk, Tensor.topk) and args[0].shape[-1] == self.router.num_experts:
            if len(args) > 1 and args[1] == self.router.top_k:
                args = (args[0], self.router.num_experts, *args[2:])
            elif options.get("k") == self.router.top_k:
                options["k"] = self.router.num_experts
        return func(*args, **options)


class DenseGradient(RouterHook):
    """A router hook whose replaced logits get their gradient through all experts."""

    def __init__(self, router: Router, callback: Callback, experts: nn.Module) -> None:
        super().__init__(router, callback)
        self.experts = experts
        self.all_experts: tuple[Tensor, Tensor] | None = None

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        super().after(module, args, kwargs, output)
        if output is None:
            return None
        with ReplaceLogits(self.router, self.callback), ChooseAll(self.router):
            everything = module.forward(*args, **kwargs)
        index, weight = self._places(output)
        self.all_experts = everything[index], everything[weight]
        return tuple(part.detach() if isinstance(part, Tensor) else part for part in output)

    def after_experts(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        if self.all_experts is None or len(args) != 3 or kwargs:
            raise unsupported(self.router)
        indices, weights = self.all_experts
        self.all_experts = None
        dense: Tensor = module.forward(args[0].detach(), indices, weights)
        return output + (dense - dense.detach())

    def install(self) -> list[RemovableHandle]:
        return [
            *super().install(),
            self.experts.register_forward_hook(self.after_experts, with_kwargs=True),
        ]

    def _places(self, output: Any) -> tuple[int, int]:
        """Where in the router's output the chosen experts are, and where their weights."""
        parts = output if isinstance(output, tuple) else ()
        fitting = {
            place: part.dtype.is_floating_point
            for place, part in enumerate(parts)
            if isinstance(part, Tensor) and part.shape[-1] == self.router.top_k
        }
        indices = [place for place, floating in fitting.items() if not floating]
        weights = [place for place, floating in fitting.items() if floating]
        if not indices or not weights:
            raise unsupported(self.router)
        return indices[0], weights[-1]


def dense_gradient(model: nn.Module, router: Router, callback: Callback) -> DenseGradient:
    """The hook for `router`, with the experts module of its block."""
    experts = getattr(block_of(model, router.name), "experts", None)
    if not isinstance(experts, nn.Module):
        raise unsupported(router)
    return DenseGradient(router, callback, experts)


def unsupported(router: Router) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"gradient='dense' needs a block that calls experts(hidden_states, indices, weights); the "
        f"one around router {router.name!r} does not. Use gradient='sparse'."
    )
