"""Gradients through all experts, against autograd through all experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import knn_moe.routers.dense_gradients
from helpers.slow_reference import expert_output
from helpers.zoo import family, full_batch
from knn_moe import BuildConfig, find_routers
from knn_moe.build.optimise import optimise_routing, summed_loss
from knn_moe.reference.windows import Batch
from knn_moe.routers.dense_gradients import Experts, StraightThrough
from knn_moe.routers.find import Router, block_of
from knn_moe.routers.model_state import freeze

three_families = pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "gpt_oss"])

TOKENS = 5


def experts_of(model: PreTrainedModel, router: Router) -> nn.Module:
    module: nn.Module = block_of(model, router.name).experts
    return module


def every_expert(experts: nn.Module, number: int, x: Tensor) -> Tensor:
    """E_j(x) one expert and one token at a time. Shapes: x [T, d] → [T, N, d]."""
    return torch.stack(
        [torch.stack([expert_output(experts, j, row) for j in range(number)]) for row in x]
    )


@three_families
@pytest.mark.parametrize("together", [1, 3, 1 << 15], ids=["one", "three", "all at once"])
@pytest.mark.parametrize("grouped", [False, True])
def test_gains_are_what_each_expert_would_add(
    name: str, together: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family(name)
    router = find_routers(model)[0]
    numbers = together * TOKENS * router.hidden_size
    monkeypatch.setattr(knn_moe.routers.dense_gradients, "_TOGETHER", numbers)
    monkeypatch.setattr(knn_moe.routers.dense_gradients, "runs_grouped", lambda experts: grouped)
    experts = experts_of(model, router)
    x, slope = torch.randn(2, TOKENS, router.hidden_size)
    with torch.no_grad():
        gains = Experts(experts, router.num_experts).weight_gradient(x, slope)
        expected = (every_expert(experts, router.num_experts, x) * slope[:, None]).sum(dim=-1)
    assert gains.dtype == torch.float32
    torch.testing.assert_close(gains, expected, rtol=1e-4, atol=1e-5)


@three_families
def test_forward_is_untouched_and_backward_follows_the_order_of_indices(name: str) -> None:
    model = family(name).requires_grad_(False)
    router = find_routers(model)[0]
    experts = Experts(experts_of(model, router), router.num_experts)
    x, output, slope = torch.randn(3, TOKENS, router.hidden_size)
    output.requires_grad_()
    weights = torch.rand(TOKENS, router.num_experts, requires_grad=True)
    indices = torch.rand(weights.shape).argsort(dim=1)  # another order for each token
    result = StraightThrough.apply(output, weights, indices, x, experts)
    assert torch.equal(result, output)
    to_output, to_weights = torch.autograd.grad(result, (output, weights), slope)
    assert torch.equal(to_output, slope)
    assert torch.equal(to_weights, experts.weight_gradient(x, slope).gather(1, indices))


def naive_slopes(model: PreTrainedModel, routers: list[Router], batch: Batch) -> list[Tensor]:
    """∂L/∂r where each block's output is the sparse one in value, and in gradient to r that of
    Σ_j p_j E_j(x.detach()), p = softmax(r): what all three gatings are with every expert chosen."""
    leaves: list[Tensor] = []
    handles = []

    def start(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, -2)
        logits = F.linear(x, module.weight, getattr(module, "bias", None))
        leaves.append(logits.detach().requires_grad_())

    def cut(module: nn.Module, args: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(part.detach() for part in output)

    def add_gradient(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        probabilities = leaves[-1].softmax(dim=-1)
        each = every_expert(module, probabilities.shape[-1], args[0].detach())
        dense = (probabilities[..., None] * each).sum(dim=1)
        return output + (dense - dense.detach()).view_as(output)

    for router in routers:
        handles += [
            router.module.register_forward_pre_hook(start),
            router.module.register_forward_hook(cut),
            experts_of(model, router).register_forward_hook(add_gradient),
        ]
    loss = summed_loss(model, batch)
    for handle in handles:
        handle.remove()
    return list(torch.autograd.grad(loss, leaves))


@three_families
def test_a_build_step_descends_the_naive_gradient(name: str) -> None:
    model = family(name)
    routers = find_routers(model)
    ids = torch.randint(3, 128, (2, TOKENS))
    batch = full_batch(ids)
    config = BuildConfig(steps=1, learning_rate=1.0, gradient="dense")
    with freeze(model):
        expected = naive_slopes(model, routers, batch)
        start = optimise_routing(model, routers, batch, BuildConfig(steps=0))
        moved = optimise_routing(model, routers, batch, config)
    for router, slope in zip(routers, expected, strict=True):
        found = start[router.layer].logits - moved[router.layer].logits
        scale = float(slope.abs().max())
        assert scale > 1e-3
        torch.testing.assert_close(found, slope, rtol=1e-3, atol=1e-4 * scale)
        assert (slope.abs() > 1e-3 * scale).all(dim=1).any()  # experts not chosen as well
