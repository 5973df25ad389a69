"""experiments/upcycle.py: a mixture starts as a mixture of whole feed-forwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.small_gguf import small_llama
from helpers.small_mixtures import FORMS
from knn_moe.routers.find import find_routers
from upcycle import feed_forwards, mix


@pytest.fixture(scope="module")
def dense() -> Any:
    return small_llama()


@pytest.fixture(scope="module")
def branches(dense: Any) -> list[dict[str, Tensor]]:
    """Five copies whose feed-forwards are far from the original's."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            name: weight + 0.3 * torch.randn(weight.shape, generator=generator)
            for name, weight in feed_forwards(dense).items()
        }
        for _ in range(5)
    ]


@pytest.fixture(scope="module")
def rows(dense: Any) -> Tensor:
    """Return router rows of five branches in two layers."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 5, dense.config.hidden_size, generator=generator)


def run_feed_forward(weights: dict[str, Tensor], layer: int, x: Tensor) -> Tensor:
    gate, up, down = (
        weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_mixture_of_equal_copies_is_the_dense_model(
    form: str, dense: Any, rows: Tensor, tmp_path: Path
) -> None:
    model = mix(dense, [feed_forwards(dense)] * 5, rows, FORMS[form])
    ids = torch.randint(3, 200, (2, 40))
    expected = dense(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["shards", "whole"])
@torch.no_grad()
def test_a_block_mixes_the_two_likeliest_feed_forwards(
    form: str, dense: Any, branches: list[dict[str, Tensor]], rows: Tensor
) -> None:
    model = mix(dense, branches, rows, FORMS[form])
    copies = [feed_forwards(dense), *branches]
    x = torch.randn(1, 30, dense.config.hidden_size)
    for router, layer in zip(find_routers(model), model.model.layers, strict=True):
        shards = router.weight.view(len(copies), -1, router.hidden_size)
        assert torch.equal(shards, shards[:, :1].expand_as(shards))
        weights, chosen = F.linear(x[0], shards[:, 0]).softmax(-1).topk(2)
        outputs = torch.stack([run_feed_forward(copy, router.layer, x[0]) for copy in copies])
        picked = outputs[chosen, torch.arange(30)[:, None]]
        expected = (picked * (weights / weights.sum(-1, keepdim=True))[..., None]).sum(1)
        torch.testing.assert_close(layer.mlp(x)[0], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_block_with_a_shared_expert_adds_the_likeliest_branch(
    dense: Any, branches: list[dict[str, Tensor]], rows: Tensor
) -> None:
    model = mix(dense, branches, rows, FORMS["shared"])
    x = torch.randn(1, 30, dense.config.hidden_size)
    for router, layer in zip(find_routers(model), model.model.layers, strict=True):
        chosen = F.linear(x[0], router.weight[::4]).argmax(-1)
        outputs = torch.stack([run_feed_forward(copy, router.layer, x[0]) for copy in branches])
        original = run_feed_forward(feed_forwards(dense), router.layer, x[0])
        expected = 0.5 * original + 0.5 * outputs[chosen, torch.arange(30)]
        torch.testing.assert_close(layer.mlp(x)[0], expected, rtol=1e-4, atol=1e-4)


def test_routers_have_the_branches_rows_and_their_mean_for_the_original(
    dense: Any, branches: list[dict[str, Tensor]], rows: Tensor
) -> None:
    model = mix(dense, branches, rows, replace(FORMS["whole"], router_spread=3.0))
    for router, expected in zip(find_routers(model), rows, strict=True):
        assert torch.equal(router.weight[1:], 3 * expected)
        torch.testing.assert_close(router.weight[0], 3 * expected.mean(dim=0))


def test_experts_that_do_not_fit_are_refused(dense: Any, rows: Tensor) -> None:
    with pytest.raises(ValueError, match=r"6 experts of width 32 cannot hold 3 feed-forwards"):
        mix(dense, [feed_forwards(dense)] * 2, rows, FORMS["whole"])
