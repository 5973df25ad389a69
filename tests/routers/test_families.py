"""Routers of every family are found, intercepted and optimised, and left unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from helpers.families import FAMILIES, Family
from helpers.zoo import encode, family, full_batch, make_texts
from knn_moe import BuildConfig, RoutingConfig, attach, build_memory, find_routers
from knn_moe.build.optimise import RoutingLogits, optimise_routing, summed_loss
from knn_moe.errors import UnsupportedModelError
from knn_moe.reference.windows import Batch
from knn_moe.routers.intercept import RouterHook, run_router
from knn_moe.routers.model_state import freeze, install_hooks

# Their blocks do not call experts(hidden_states, indices, weights) on what the router returns.
NO_TRUE_GRADIENT = {"phimoe"}
NO_DENSE_GRADIENT = {"llama4_text", "dbrx", "jetmoe"}

every_family = pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.name)


def random_batch(rows: int = 2, length: int = 9) -> Batch:
    return full_batch(torch.randint(3, 128, (rows, length)))


def hook_count(model: torch.nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


@every_family
def test_routers_are_found_by_layer(entry: Family) -> None:
    routers = find_routers(entry.build())
    assert tuple(router.layer for router in routers) == entry.moe_layers
    assert {router.num_experts for router in routers} == {entry.num_experts}
    assert {router.top_k for router in routers} == {entry.top_k}


@every_family
def test_nothing_to_mix_changes_no_bit(entry: Family, zoo_tokenizer: object) -> None:
    model = entry.build()
    batch = random_batch()
    base = model(batch.ids, use_cache=False).logits
    seen: dict[int, torch.Tensor] = {}

    for router in find_routers(model):

        def look(x: torch.Tensor, logits: torch.Tensor, layer: int = router.layer) -> torch.Tensor:
            seen[layer] = x
            return logits.clone()

        RouterHook(router, look).install()
    assert torch.equal(model(batch.ids, use_cache=False).logits, base)
    assert set(seen) == set(entry.moe_layers)
    assert all(x.shape == (18, find_routers(model)[0].hidden_size) for x in seen.values())


@every_family
def test_zero_confidence_is_the_base_model_bit_for_bit(
    entry: Family, zoo_tokenizer: object
) -> None:
    model = entry.build()
    memory = build_memory(model, zoo_tokenizer, make_texts(4), BuildConfig(learning_rate=1.0))
    ids = encode(zoo_tokenizer, make_texts(1, seed=9)[0])
    base = model(ids, use_cache=False).logits
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = hook_count(model)
    # So narrow a kernel that every similarity underflows to 0.
    with attach(model, memory, RoutingConfig(gamma=1e30)) as routing:
        assert torch.equal(model(ids, use_cache=False).logits, base)
        assert all(layer.mean_confidence == 0 for layer in routing.stats().values())
        assert all(layer.changed == 0 for layer in routing.stats().values())
    with attach(model, memory, RoutingConfig(gamma=1e-30)):
        assert not torch.equal(model(ids, use_cache=False).logits, base)
    assert torch.equal(model(ids, use_cache=False).logits, base)
    assert hook_count(model) == hooks
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], value) for name, value in state.items())


@every_family
def test_one_backward_reaches_every_layer(entry: Family) -> None:
    model = entry.build()
    batch = random_batch()
    routers = find_routers(model)
    layers = [RoutingLogits(router) for router in routers]
    with freeze(model):
        for layer in layers:
            RouterHook(layer.router, layer).install()
        loss = summed_loss(model, batch)
        slopes = torch.autograd.grad(loss, [layer.leaf for layer in layers])
    for slope in slopes:
        assert slope.isfinite().all()
        assert slope.abs().sum() > 0


@every_family
def test_optimised_logits_lower_the_loss(entry: Family) -> None:
    if entry.name in NO_TRUE_GRADIENT:
        pytest.skip("SparseMixer's backward is an estimator, not the gradient of its forward")
    model = entry.build()
    batch = random_batch()
    config = BuildConfig(steps=3, learning_rate=1e-3)
    routers = find_routers(model)
    with freeze(model):
        before = summed_loss(model, batch)
        cases = optimise_routing(model, routers, batch, config)
        for router in routers:
            logits = cases[router.layer].logits
            RouterHook(router, lambda x, own, logits=logits: logits).install()
        assert summed_loss(model, batch) < before


@every_family
def test_dense_gradients_reach_experts_that_were_not_chosen(entry: Family) -> None:
    model = entry.build()
    batch = random_batch()
    routers = find_routers(model)
    start = BuildConfig(steps=0)
    dense = BuildConfig(steps=1, learning_rate=1.0, gradient="dense")
    # A router that is a bare linear map (Jamba up to transformers 5.17) chooses in its block, too.
    if entry.name in NO_DENSE_GRADIENT or type(routers[0].module) is torch.nn.Linear:
        with freeze(model), pytest.raises(UnsupportedModelError, match="gradient='sparse'"):
            optimise_routing(model, routers, batch, dense)
        return
    base = model(batch.ids, use_cache=False).logits
    with freeze(model):
        own = optimise_routing(model, routers, batch, start)
        better = optimise_routing(model, routers, batch, dense)
    for router in routers:
        moved = (better[router.layer].logits - own[router.layer].logits).abs() > 0
        assert moved.sum() > entry.top_k * len(moved)
        # The forward pass stays the sparse model's own.
        assert torch.equal(own[router.layer].inputs, better[router.layer].inputs)
    assert torch.equal(model(batch.ids, use_cache=False).logits, base)


def test_gating_is_the_routers_own_forward() -> None:
    model = family("deepseek_v3")
    router = find_routers(model)[0]
    x = torch.randn(6, router.hidden_size)
    logits = torch.randn(6, router.num_experts)
    returned, _, chosen = run_router(router, lambda inputs, own: logits, (x,), {})
    assert torch.equal(returned, logits)
    # Two groups of four experts, one group allowed: the correction bias and groups really act.
    assert {int(row.min()) // 4 == int(row.max()) // 4 for row in chosen} == {True}


class Listener(TorchFunctionMode):
    """Record every function that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


def test_other_modes_hear_all_of_a_router_and_a_hook_no_more_than_it_must() -> None:
    router = find_routers(family("olmoe"))[0]
    x = torch.randn(6, router.hidden_size)
    with Listener() as alone:
        expected = router.module(x)
    with install_hooks([RouterHook(router, lambda inputs, own: own)]):
        with Listener() as around:
            router.module(x)
        assert set(alone.heard) <= set(around.heard)
        assert all(torch.equal(*pair) for pair in zip(router.module(x), expected, strict=True))
        with Listener() as after:  # the hook's own mode is off, and others are on again
            torch.topk(x, 2)
    assert after.heard


def test_a_router_that_fails_leaves_no_mode_behind() -> None:
    router = find_routers(family("olmoe"))[0]
    router.module.top_k = 10**6  # more experts than there are: fails after the linear map
    with install_hooks([RouterHook(router, lambda inputs, own: own)]):
        with pytest.raises(RuntimeError, match="k"):
            router.module(torch.randn(6, router.hidden_size))
        with Listener() as after:
            torch.topk(torch.randn(4), 2)
    assert after.heard
