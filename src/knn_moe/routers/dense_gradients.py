"""Straight-through gradients to the routing logits of all experts, not only the chosen ones.

The forward pass stays the sparse model's: Σ_{top-k} a_j E_j(x). The backward pass gives every logit
its gradient through Σ_j p_j E_j(x.detach()), where p is the router's own gating with k = N. This
costs N / top_k times the experts' arithmetic. Under gatings that renormalise the chosen experts
(Qwen3, GPT-OSS) the sparse gradient of all other logits is exactly zero.

Knows that an MoE block calls `experts(hidden_states, indices, weights)`; refuses families whose
block does not.
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
from knn_moe.routers.grouped_experts import each_expert, runs_grouped
from knn_moe.routers.intercept import Callback, RouterHook, Watch, run_router

_TOGETHER: Final = 1 << 26  # tokens × experts × width that run together


class ChooseAll(TorchFunctionMode):
    """While active, make the router's top-k over its experts choose all of them."""

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


def _choose_all(
    router: Router, logits: Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return what the router returns for `logits` if it chooses all experts. Shape [T, N]."""
    mode = ChooseAll(router)
    # Not `with mode:`, whose Python code an interrupt may end with the mode still active.
    try:
        torch._C._push_on_torch_function_stack(mode)
        return run_router(router, lambda _, own: own if logits is None else logits, args, kwargs)
    finally:
        torch._C._pop_torch_function_stack()


class StraightThrough(torch.autograd.Function):
    """Return the experts' output unchanged; in the backward pass, give all weights a gradient.

    The gradient of Σ_j p_j E_j(x) to p_j is ⟨slope, E_j(x)⟩, slope being the output's. It needs no
    graph: the experts run in the backward pass only, a few at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, weights: Tensor, indices: Tensor, x: Tensor, experts: Experts
    ) -> Tensor:
        """Shapes: output, x [T, d]; weights, indices [T, N], the experts in any order."""
        ctx.save_for_backward(indices, x)
        ctx.experts, ctx.dtype = experts, weights.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        indices, x = ctx.saved_tensors
        (slope,) = slopes
        gradient = ctx.experts.weight_gradient(x, slope).gather(1, indices)
        return slope, gradient.to(ctx.dtype), None, None, None


@dataclass(frozen=True)
class Experts:
    """The experts of one block, whose outputs are computed one by one instead of mixed."""

    module: nn.Module
    count: int

    def weight_gradient(self, x: Tensor, slope: Tensor) -> Tensor:
        """Return ⟨slope, E_j(x)⟩ for every expert j. Shapes: x, slope [T, d] → [T, N] fp32."""
        together = max(1, _TOGETHER // x.numel())
        parts = [
            (self._outputs(x, first, min(first + together, self.count)) * slope)
            .sum(dim=-1, dtype=torch.float32)
            .T
            for first in range(0, self.count, together)
        ]
        return torch.cat(parts, dim=1)

    def _outputs(self, x: Tensor, first: int, last: int) -> Tensor:
        """Return E_j(x) of some experts. Shapes: x [T, d] → [last - first, T, d]."""
        if runs_grouped(self.module):
            return each_expert(self.module, x, first, last)
        # Experts that transformers does not dispatch may not accept a single choice (LongCat): they
        # get it twice, the second time with no weight.
        columns = 1 if hasattr(self.module, "has_gate") else 2
        experts = torch.arange(first, last, device=x.device)
        index = experts.repeat_interleave(len(x))[:, None].expand(-1, columns)
        weight = torch.zeros(index.shape, dtype=x.dtype, device=x.device)
        weight[:, 0] = 1
        outputs: Tensor = self.module.forward(x.repeat(len(experts), 1), index, weight)
        return outputs.view(len(experts), *x.shape)


class DenseGradientHook(RouterHook):
    """A router hook whose replaced logits get their gradient through all experts.

    Args:
        model: The model that `router` belongs to.
        router: The router whose logits go through `callback`.
        callback: (inputs [T, d], logits [T, N]) → the logits to use [T, N].

    Raises:
        UnsupportedModelError: The router's block does not call its experts in the usual way.
    """

    def __init__(self, model: nn.Module, router: Router, callback: Callback) -> None:
        super().__init__(router, callback)
        experts = getattr(block_of(model, router.name), "experts", None)
        if not isinstance(experts, nn.Module):
            raise _unsupported(router)
        self.experts = Experts(experts, router.num_experts)
        self.all_experts: tuple[Tensor, Tensor] | None = None

    def finish(
        self,
        watch: Watch,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Weigh all experts by the same logits; the router's own output gets no gradient."""
        of_all = _choose_all(self.router, watch.logits, args, kwargs)
        index, weight = self._find_choice(output)
        self.all_experts = of_all[index], of_all[weight]
        return tuple(part.detach() if isinstance(part, Tensor) else part for part in output)

    def after_experts(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        if self.all_experts is None or len(args) != 3 or kwargs:
            raise _unsupported(self.router)
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

    def _find_choice(self, output: Any) -> tuple[int, int]:
        """Return the positions of the chosen experts and of their weights in a router's output."""
        parts = output if isinstance(output, tuple) else ()
        floating = {
            position: part.dtype.is_floating_point
            for position, part in enumerate(parts)
            if isinstance(part, Tensor) and part.shape[-1] == self.router.top_k
        }
        indices = [position for position in floating if not floating[position]]
        weights = [position for position in floating if floating[position]]
        if not indices or not weights:
            raise _unsupported(self.router)
        return indices[0], weights[-1]


def _unsupported(router: Router) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"gradient='dense' needs a block that calls experts(hidden_states, indices, weights); the "
        f"one around router {router.name!r} does not. Use gradient='sparse'."
    )
