"""Run the experts as grouped matrix products that are cheap to differentiate.

transformers has a registry of ways to run the experts. This one computes the same as its
`grouped_mm`, with two differences: the backward passes of the two permutations around the products
are gathers instead of scattered additions, and the masks that only expert parallelism needs are
left out. It is used only while a memory is built or
calibrated on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from knn_moe.routers.model_state import unwrap

NAME: Final = "knn_moe_grouped"
_TRANSFORMERS: Final = ("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")  # its own ways


class SpreadRows(torch.autograd.Function):
    """Copy row `source[i]` of x to row i; every row of x is copied `copies` times.

    Shapes: x [T, d]; source [T × copies]; places [T × copies], the rows that the copies of x[0],
    x[1], … went to. Result [T × copies, d].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = copies
        return x[source]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        (slope,) = slopes
        return slope[places].view(-1, ctx.copies, slope.shape[-1]).sum(dim=1), None, None, None


class PermuteRows(torch.autograd.Function):
    """Move row `order[i]` of x to row i; `inverse` undoes it. Shapes: x [n, d]; both [n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return slopes[0][inverse], None, None


def grouped_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return Σ_j a_j E_j(x), as transformers calls its experts (§3).

    Shapes: hidden_states [T, d]; top_k_index, top_k_weights [T, top_k]. Result [T, d].
    """
    top_k = top_k_index.shape[-1]
    expert, order = torch.sort(top_k_index.reshape(-1))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    counts = torch.histc(expert.int(), bins=self.num_experts, min=0, max=self.num_experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)

    spread: Any = SpreadRows.apply
    permute: Any = PermuteRows.apply
    x: Tensor = spread(hidden_states, order // top_k, inverse, top_k)
    x = _run_sorted(self, x, expert, offsets)
    x = permute(x, inverse, order).view(-1, top_k, hidden_states.shape[-1])
    return (x * top_k_weights[:, :, None]).sum(dim=1).to(hidden_states.dtype)


def each_expert(self: Any, hidden_states: Tensor, first: int, last: int) -> Tensor:
    """Return E_j(x) of each expert j, first ≤ j < last. Rows are in the experts' order already, so
    nothing is sorted.

    Shapes: hidden_states [T, d]. Result [last - first, T, d].
    """
    tokens, device = len(hidden_states), hidden_states.device
    numbers = torch.arange(first, last, device=device)
    offsets = torch.arange(1, last - first + 1, device=device, dtype=torch.int32) * tokens
    x = hidden_states.repeat(last - first, 1)
    x = _run_sorted(self, x, numbers.repeat_interleave(tokens), offsets, slice(first, last))
    return x.view(-1, *hidden_states.shape)


def _run_sorted(
    self: Any, x: Tensor, expert: Tensor, offsets: Tensor, which: slice = slice(None)
) -> Tensor:
    """Run rows through their experts.

    Shapes: x [n, d], sorted by expert; expert [n]; offsets, the end of each expert's rows, for the
    experts in `which`. Result [n, d].
    """

    def linear(x: Tensor, name: str) -> Tensor:
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        weight = getattr(self, name)[which]
        result: Tensor = moe._grouped_linear(
            x, weight, offsets, bias=bias, is_transposed=self.is_transposed
        )
        return result

    if self.has_gate:
        x = self._apply_gate(linear(x, "gate_up_proj"))
    else:
        x = self.act_fn(linear(x, "up_proj"))
    x = linear(x, "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    return x


def runs_grouped(experts: nn.Module) -> bool:
    """Return whether these experts run as `grouped_experts` now."""
    config = getattr(experts, "config", None)
    chosen = getattr(config, "_experts_implementation", None) == NAME
    return chosen and hasattr(experts, "has_gate")


@contextmanager
def use_grouped_experts(model: nn.Module) -> Iterator[None]:
    """Run the experts of `model` in the fastest way that has gradients, while inside.

    Families whose experts transformers does not dispatch keep theirs, and so do models that compute
    them with other code than transformers' own: quantised weights have other forms.
    """
    inner = unwrap(model)
    before = getattr(getattr(inner, "config", None), "_experts_implementation", None)
    before = before if before in _TRANSFORMERS else None
    chosen = _fastest(inner)
    try:
        if before is not None and chosen != before:
            inner.set_experts_implementation(chosen)
    except ValueError:  # a family whose experts are not dispatched
        before = None
    try:
        yield
    finally:
        if before is not None and chosen != before:
            inner.set_experts_implementation(before)


def _fastest(model: Any) -> str:
    if model.dtype == torch.float64:
        return "eager"  # grouped products have no float64
    single_gpu = model.device.type == "cuda" and not torch.distributed.is_initialized()
    if not single_gpu or not hasattr(moe, "_grouped_linear"):
        return "grouped_mm"
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    return NAME
