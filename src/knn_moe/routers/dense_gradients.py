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
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from knn_moe.errors import UnsupportedModelError
from knn_moe.routers.find import Router, block_of
from knn_moe.routers.intercept import Callback, ReplaceLogits, RouterHook

_ROWS: Final = 1 << 15  # tokens × experts that are run together


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


class StraightThrough(torch.autograd.Function):
    """The experts' output as it is; on the way back, a gradient for the weights of all experts.

    What d Σ_j p_j E_j(x) / dp_j is, ⟨slope, E_j(x)⟩, needs no graph: the experts run in the
    backward pass only, a few at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, weights: Tensor, indices: Tensor, x: Tensor, experts: Experts
    ) -> Tensor:
        """Shapes: output, x [T, d]; weights, indices [T, n], experts in any order."""
        ctx.save_for_backward(indices, x)
        ctx.experts, ctx.dtype = experts, weights.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        indices, x = ctx.saved_tensors
        (slope,) = slopes
        gains = ctx.experts.gains(x, slope).gather(1, indices)
        return slope, gains.to(ctx.dtype), None, None, None


@dataclass(frozen=True)
class Experts:
    """The experts of one block, run one by one instead of mixed."""

    module: nn.Module
    number: int

    def gains(self, x: Tensor, slope: Tensor) -> Tensor:
        """⟨slope, E_j(x)⟩ for every expert j. Shapes: x, slope [T, d] → [T, N] fp32."""
        together = max(1, _ROWS // len(x))
        parts = [
            self._gains_of(range(start, min(start + together, self.number)), x, slope)
            for start in range(0, self.number, together)
        ]
        return torch.cat(parts, dim=1)

    def _gains_of(self, numbers: range, x: Tensor, slope: Tensor) -> Tensor:
        # Experts that transformers does not dispatch may not know a single choice (LongCat): they
        # get it twice, the second time with no weight.
        columns = 1 if hasattr(self.module, "has_gate") else 2
        count = len(numbers)
        chosen = torch.arange(numbers.start, numbers.stop, device=x.device)
        index = chosen.repeat_interleave(len(x))[:, None].expand(-1, columns)
        weight = torch.zeros(index.shape, dtype=x.dtype, device=x.device)
        weight[:, 0] = 1
        values: Tensor = self.module.forward(x.repeat(count, 1), index, weight)
        return (values.view(count, *x.shape) * slope).sum(dim=-1, dtype=torch.float32).T


class DenseGradient(RouterHook):
    """A router hook whose replaced logits get their gradient through all experts."""

    def __init__(self, router: Router, callback: Callback, experts: nn.Module) -> None:
        super().__init__(router, callback)
        self.experts = Experts(experts, router.num_experts)
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
        straight_through: Any = StraightThrough.apply
        result: Tensor = straight_through(output, weights, indices, args[0].detach(), self.experts)
        return result

    def install(self) -> list[RemovableHandle]:
        return [
            *super().install(),
            self.experts.module.register_forward_hook(self.after_experts, with_kwargs=True),
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
