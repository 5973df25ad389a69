"""Distilled layers with random prototypes, and what kernels must make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from helpers.kernel_layers import DEVICE, changed, no_counts, randn
from knn_moe import RoutingConfig, RoutingMemory
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.recall.distilled import DistilledRecall
from knn_moe.recall.fused_prototypes import FusedPrototypes
from knn_moe.recall.layer import UNITS
from knn_moe.recall.prototype_tensors import PrototypeTensors, stack_prototypes

# Recalls inputs and logits, adds to the counts; `real` as in DistilledRecall.
Recall = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
FACTOR = 0.9


@dataclass(frozen=True)
class PrototypeCase:
    """The sizes of a layer, and how many tokens it gets."""

    tokens: int
    prototypes: int
    experts: int = 8
    width: int = 192
    top: int = 2
    padded: bool = False

    def __str__(self) -> str:
        sizes = f"T{self.tokens}-P{self.prototypes}-N{self.experts}-d{self.width}-top{self.top}"
        return sizes + "-padded" * self.padded


class PrototypeLayer:
    """A distilled layer that recalls in plain torch, tokens for it, and what it must count."""

    def __init__(self, case: PrototypeCase, dtype: torch.dtype = torch.float32) -> None:
        self.case, self.dtype = case, dtype
        self.recall = made_up_recall(case, dtype)
        self.recall.fused = None
        near = self.recall.factors[case.experts :].float() + self.recall.centre
        pick = torch.arange(case.tokens, device=DEVICE) % case.prototypes
        self.inputs = (near[pick] + 0.5 * randn(case.tokens, case.width)).to(dtype)
        self.logits = randn(case.tokens, case.experts).to(dtype)
        self.real = torch.arange(case.tokens, device=DEVICE) % 3 > 0 if case.padded else None

    def tensors(self) -> PrototypeTensors:
        return self.recall.tensors()

    def fused(self) -> FusedPrototypes:
        return FusedPrototypes(self.tensors(), self.case.top)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return mixed logits, not rounded to the logits' dtype, and confidence."""
        return self.recall(self.inputs, self.logits.float())


def made_up_recall(case: PrototypeCase, dtype: torch.dtype) -> DistilledRecall:
    """Make a layer whose confidence is about a half, far from the origin."""
    layer = DistilledLayer(
        keys=(3 + torch.randn(case.prototypes, case.width)).to(dtype),
        updates=torch.randn(case.prototypes, case.experts),
        linear=(torch.randn(case.experts, case.width) / case.width).to(dtype),
        cases=torch.zeros(case.prototypes, dtype=torch.int64),
        gamma=8 / case.width,
        log_threshold=-2.0 + 0.2 * torch.randn(()).item(),
    )
    return DistilledRecall(layer, RoutingConfig(), FACTOR, DEVICE)


def stack_layers(layers: list[PrototypeLayer]) -> FusedPrototypes:
    """Return the kernels of several layers."""
    stacked = stack_prototypes([layer.tensors() for layer in layers])
    return FusedPrototypes(stacked, layers[0].case.top)


def check_mixing(layer: PrototypeLayer, run: Recall) -> tuple[Tensor, Tensor]:
    """Mixed logits, confidence and counts as by plain torch, as exactly as the dtype allows."""
    counts = no_counts()
    mixed, weight = run(layer.inputs, layer.logits, counts, layer.real)
    expected, expected_weight = layer.expected()
    assert (mixed.dtype, weight.dtype) == (layer.dtype, torch.float32)
    torch.testing.assert_close(weight, expected_weight, rtol=2e-4, atol=2e-4)
    rounding = max(5e-4, 2 * torch.finfo(layer.dtype).eps)
    torch.testing.assert_close(mixed.float(), expected, rtol=rounding, atol=rounding)
    real = torch.ones_like(weight, dtype=torch.bool) if layer.real is None else layer.real
    check_counted(counts, layer, mixed, weight, real)
    return mixed, weight


def check_counted(
    counts: Tensor, layer: PrototypeLayer, mixed: Tensor, weight: Tensor, tokens: Tensor
) -> None:
    """One call, its tokens, those of them whose experts changed, and the sum of λ."""
    calls, counted, moved, units = counts.tolist()
    assert (calls, counted) == (1, tokens.sum())
    assert moved == (changed(layer.logits, mixed, layer.case.top) * tokens).sum()
    assert abs(units - (weight.double() * tokens).sum().item() * UNITS) <= len(weight)


def distil_by_hand(memory: RoutingMemory, prototypes: int, seed: int = 0) -> RoutingMemory:
    """Return a memory whose prototypes are some of its cases, with large random updates."""
    draw = torch.Generator().manual_seed(seed)
    layers = {}
    for index, layer in memory.full_layers().items():
        picked = torch.randperm(len(layer), generator=draw)[:prototypes]
        experts, width = layer.values.shape[1], layer.keys.shape[1]
        layers[index] = DistilledLayer(
            keys=layer.keys[picked],
            updates=4 * torch.randn(prototypes, experts, generator=draw),
            linear=(torch.randn(experts, width, generator=draw) / width).to(layer.keys.dtype),
            cases=picked,
            gamma=layer.gamma,
            log_threshold=-1.0,
        )
    return replace(memory, layers=layers)
