"""Routers are found by declaration, by name or by an adapter; a model without any is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import PreTrainedModel

from helpers.families import FAMILIES, Family
from helpers.zoo import family
from knn_moe import find_routers
from knn_moe.errors import UnsupportedModelError
from knn_moe.routers import find as routers
from knn_moe.routers.find import _find_declared, _find_named
from knn_moe.routers.fingerprint import (
    fingerprint,
    identify,
    layer_digests,
    matches_sketch,
    sketch_weights,
)
from knn_moe.routers.intercept import run_router


def test_a_router_says_what_it_maps(zoo_olmoe: PreTrainedModel) -> None:
    first = find_routers(zoo_olmoe)[0]
    assert (first.name, first.layer) == ("model.layers.0.mlp.gate", 0)
    assert (first.hidden_size, first.num_experts, first.top_k) == (32, 8, 2)
    assert first.module is zoo_olmoe.model.layers[0].mlp.gate
    assert "model.layers.0.mlp.gate" in repr(first)


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.name)
def test_declaration_and_name_agree(entry: Family) -> None:
    """Releases differ in what they declare; both ways must find the same modules."""
    model = entry.build()
    by_name = _find_named(model)
    assert set(by_name.values()) == {router.module for router in find_routers(model)}
    declared = _find_declared(model)
    assert not declared or set(declared.values()) == set(by_name.values())


def test_moe_attention_is_left_out() -> None:
    model = family("jetmoe")
    gates = [
        name for name, module in model.named_modules() if "TopKGating" in type(module).__name__
    ]
    found = [router.name for router in find_routers(model)]
    assert len(gates) == 2 * len(found)
    assert not any("attention" in name for name in found)


def test_gates_of_shared_experts_are_left_out() -> None:
    model = family("qwen2_moe")
    assert any("shared_expert_gate" in name for name, _ in model.named_modules())
    assert not any("shared" in router.name for router in find_routers(model))


class Switch(nn.Module):
    """A router of nobody's making, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 1
        self.proj = nn.Linear(4, 3, bias=False)


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"chooser": Switch()}) for _ in range(2))


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Strange has no router.*knn_moe\.routers"):
        find_routers(Strange())


def test_an_adapter_finds_what_we_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def load(self) -> object:
            return lambda model: {
                name: module for name, module in model.named_modules() if name.endswith("chooser")
            }

    monkeypatch.setattr(routers, "entry_points", lambda group: [Entry()])
    found = find_routers(Strange())
    assert [(r.layer, r.num_experts, r.hidden_size, r.top_k) for r in found] == [
        (0, 3, 4, 1),
        (1, 3, 4, 1),
    ]


def test_two_routers_of_one_layer_are_counted_up() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = family("olmoe"), family("olmoe")

    assert [router.layer for router in find_routers(Twice())] == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_fingerprint_is_of_the_weights(zoo_olmoe: PreTrainedModel) -> None:
    own = identify(zoo_olmoe, find_routers(zoo_olmoe))
    assert identify(family("olmoe"), find_routers(family("olmoe"))) == own
    half = family("olmoe").to(torch.bfloat16)
    assert identify(half, find_routers(half)).fingerprint == own.fingerprint
    with torch.no_grad():
        find_routers(zoo_olmoe)[1].weight[0, 0] += 1
    assert identify(zoo_olmoe, find_routers(zoo_olmoe)).fingerprint != own.fingerprint


def test_each_layer_has_a_digest_of_its_own(zoo_olmoe: PreTrainedModel) -> None:
    routers = find_routers(zoo_olmoe)
    digests = layer_digests(routers)
    assert list(digests) == [str(router.layer) for router in routers]
    assert layer_digests(routers[1:]) == {key: digests[key] for key in list(digests)[1:]}
    assert layer_digests(find_routers(family("olmoe").to(torch.bfloat16))) == digests
    with torch.no_grad():
        routers[1].weight[0, 0] += 1
    changed = layer_digests(routers)
    assert [key for key in digests if changed[key] != digests[key]] == [str(routers[1].layer)]


@pytest.mark.parametrize("built_in", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded_in", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved_in", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_one_model_in_every_precision(
    saved_in: torch.dtype, built_in: torch.dtype, loaded_in: torch.dtype
) -> None:
    routers = find_routers(family("olmoe").to(saved_in).to(built_in))
    stored, sketch = fingerprint(routers), sketch_weights(routers)
    loaded = find_routers(family("olmoe").to(saved_in).to(loaded_in))
    assert fingerprint(loaded) == stored or matches_sketch(sketch, loaded)


@pytest.mark.parametrize("change", ["another", "one weight", "one layer a little"])
def test_other_weights_are_told_in_float16(change: str) -> None:
    sketch = sketch_weights(find_routers(family("olmoe")))
    model = family("olmoe")
    last = find_routers(model)[-1].weight
    with torch.no_grad():
        if change == "another":
            for router in find_routers(model):
                router.weight.copy_(torch.randn_like(router.weight) * router.weight.std())
        elif change == "one weight":
            last[0, 0] += last.std()
        else:
            last += 0.02 * last.std() * torch.randn_like(last)
    assert not matches_sketch(sketch, find_routers(model.to(torch.float16)))


def test_the_sketch_is_for_float16_alone() -> None:
    """In other precisions the fingerprint is exact, and a slightly tuned router is told."""
    model = family("olmoe")
    sketch = sketch_weights(find_routers(model))
    assert not matches_sketch(sketch, find_routers(model))
    assert not matches_sketch(None, find_routers(model.to(torch.float16)))


def test_a_linear_map_that_is_called_by_keywords_is_found(
    zoo_olmoe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = find_routers(zoo_olmoe)[0]
    inputs = torch.randn(5, router.hidden_size)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input=hidden, weight=router.weight)

    monkeypatch.setattr(router.module, "forward", forward)
    found = run_router(router, lambda _, own: own + 1, (inputs,), {})
    assert torch.equal(found, forward(inputs) + 1)


def test_tensors_that_dispatch_in_their_own_way_are_refused(zoo_olmoe: PreTrainedModel) -> None:
    router = find_routers(zoo_olmoe)[0]
    inputs = TwoTensor(*(torch.randn(5, router.hidden_size) for _ in range(2)))
    with pytest.raises(UnsupportedModelError, match="was called with a TwoTensor"):
        run_router(router, lambda _, own: own, (inputs,), {})
