"""Counts, load and similarity shares against transformers' own loss and against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from helpers.zoo import BUILD, TEXTS, encode, family
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory, find_routers
from knn_moe.errors import AttachError, ConfigError, UnsupportedModelError
from knn_moe.inference.expert_usage import count_experts, router_load, similarity_share
from knn_moe.recall.layer import RouterCall

Encode = Callable[..., dict[str, list[int]]]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """Token ids and mask, of two texts filled up to the third's length on the left."""
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[0, :5] = mask[1, :2] = 0
    return torch.randint(3, 128, (3, 12)) * mask, mask


def hooks_of(model: PreTrainedModel) -> int:
    """How many there are of ours; transformers leaves its recorders on for good."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return sum("transformers" not in getattr(hook, "__module__", "") for hook in hooks)


def test_counts_are_the_top_of_the_logits(zoo_olmoe: PreTrainedModel, prompt: Tensor) -> None:
    with count_experts(zoo_olmoe) as counts:
        output = zoo_olmoe(prompt, use_cache=False, output_router_logits=True)
    shares = counts.shares()
    for layer, logits in enumerate(output.router_logits):
        chosen = logits.topk(2).indices.flatten().tolist()
        assert counts.counts[layer].tolist() == [chosen.count(expert) for expert in range(8)]
        assert shares[layer].sum() == pytest.approx(2)
    assert hooks_of(zoo_olmoe) == 0


@pytest.mark.parametrize("with_memory", [False, True])
def test_the_load_is_transformers_own_loss(
    with_memory: bool,
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    batch: tuple[Tensor, Tensor],
) -> None:
    ids, mask = batch
    alone = zoo_olmoe(ids, attention_mask=mask, output_router_logits=True).aux_loss
    routing = attach(zoo_olmoe, zoo_memory, RoutingConfig(gamma_scale=0.1)) if with_memory else None
    with router_load(zoo_olmoe) as load:
        assert hooks_of(zoo_olmoe) > 0
        padded = zoo_olmoe(ids, attention_mask=mask, output_router_logits=True)
    assert load.tokens == 2 * int(mask.sum())
    assert load.loss() == pytest.approx(float(padded.aux_loss), rel=1e-6)
    with router_load(zoo_olmoe) as load:
        whole = zoo_olmoe(ids, output_router_logits=True)
    assert load.tokens == 2 * ids.numel()
    assert load.loss() == pytest.approx(float(whole.aux_loss), rel=1e-6)
    assert load.loss() != pytest.approx(float(padded.aux_loss), rel=1e-3)
    if routing is None:
        assert torch.equal(padded.aux_loss, alone)
    else:
        assert float(padded.aux_loss) != pytest.approx(float(alone), rel=1e-3)
        routing.detach()
    assert hooks_of(zoo_olmoe) == 0


@pytest.mark.parametrize("with_memory", [False, True])
def test_batches_add_up(
    with_memory: bool,
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    batch: tuple[Tensor, Tensor],
) -> None:
    ids, mask = batch
    logits = []
    routing = attach(zoo_olmoe, zoo_memory, RoutingConfig(k=2)) if with_memory else None
    with router_load(zoo_olmoe) as load:
        for rows in (slice(0, 1), slice(1, 3)):
            output = zoo_olmoe(ids[rows], attention_mask=mask[rows], output_router_logits=True)
            logits.append(output.router_logits)
    if routing:
        routing.detach()
    layers = tuple(torch.cat(parts) for parts in zip(*logits, strict=True))
    assert load.loss() == pytest.approx(float(load_balancing_loss_func(layers, 8, 2, mask)))


def test_the_load_outlives_a_memory_that_comes_and_goes(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    with router_load(zoo_olmoe) as load:
        first = zoo_olmoe(prompt, output_router_logits=True).router_logits
        with attach(zoo_olmoe, zoo_memory):
            second = zoo_olmoe(prompt, output_router_logits=True).router_logits
    layers = tuple(torch.cat(parts) for parts in zip(first, second, strict=True))
    assert load.loss() == pytest.approx(float(load_balancing_loss_func(layers, 8, 2)))


def test_an_even_router_has_the_loss_top_k(zoo_olmoe: PreTrainedModel, prompt: Tensor) -> None:
    for router in find_routers(zoo_olmoe):
        torch.nn.init.zeros_(router.weight)
    with router_load(zoo_olmoe) as load:
        zoo_olmoe(prompt)
    assert load.loss() == pytest.approx(2)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_load_is_of_the_experts_really_chosen(name: str, prompt: Tensor) -> None:
    model = family(name)
    with router_load(model) as load, count_experts(model) as counts:
        model(prompt)
    assert torch.equal(load.choices, sum(counts.counts.values(), torch.zeros(8)).long())
    assert load.probability.sum() == pytest.approx(load.tokens) == 2 * prompt.numel()


@pytest.mark.parametrize("name", ["llama4_text", "gemma4_text"])
def test_routers_that_keep_their_logits_are_refused(name: str) -> None:
    model = family(name)
    with pytest.raises(UnsupportedModelError, match="does not return its logits"):
        router_load(model).__enter__()
    assert hooks_of(model) == 0


def test_a_load_of_nothing_is_told(zoo_olmoe: PreTrainedModel) -> None:
    with router_load(zoo_olmoe) as load, pytest.raises(ConfigError, match="inside router_load"):
        load.loss()


@pytest.mark.parametrize(("k", "scale"), [(5, 1.0), (5, 0.01), (2, 30.0)])
def test_shares_equal_a_plain_loop(
    k: int, scale: float, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    ids = torch.randint(3, 128, (2, 8))
    inputs: dict[int, Tensor] = {}

    def keep(call: RouterCall) -> None:
        inputs[call.layer] = call.inputs.double()

    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=k, gamma_scale=scale)) as routing:
        result = similarity_share(zoo_olmoe, routing, ids)
        with routing.observed(keep):
            zoo_olmoe(ids, use_cache=False)
    expected = {}
    for layer, cases in zoo_memory.layers.items():
        gamma, shares = cases.gamma * scale, []
        for vector in inputs[layer]:
            distances = sorted(float((vector - key.double()).square().sum()) for key in cases.keys)
            nearest = [math.exp(-gamma * (d - distances[0])) for d in distances[:k]]
            shares.append(nearest[0] / sum(nearest))
        expected[layer] = sum(shares) / len(shares)
    assert result.layers == pytest.approx(expected, rel=1e-4)
    assert result.overall == pytest.approx(sum(expected.values()) / len(expected), rel=1e-4)
    assert result.tokens == 16
    assert 1 / k < result.overall < 1


def test_shares_where_every_similarity_underflows(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=5, gamma_scale=1e6)) as routing:
        result = similarity_share(zoo_olmoe, routing, prompt)
        assert routing.stats()[1].mean_confidence == 0
    assert result.layers[1] == pytest.approx(1, abs=1e-6)
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=1)) as routing:
        assert similarity_share(zoo_olmoe, routing, prompt).overall == 1


def test_shares_of_what_cannot_be_asked(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing:
        with pytest.raises(ConfigError, match=r"got \[9\]"):
            similarity_share(zoo_olmoe, routing, prompt[0])
        with pytest.raises(AttachError, match="does not call the attached memory"):
            similarity_share(family("olmoe"), routing, prompt)
    with pytest.raises(AttachError, match="is detached"):
        similarity_share(zoo_olmoe, routing, prompt)


def test_a_text_of_the_reference_is_its_own_nearest(zoo_tokenizer: Encode) -> None:
    model = family("gpt_oss")
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    with attach(model, memory, RoutingConfig(k=5, gamma_scale=1e4)) as routing:
        result = similarity_share(model, routing, encode(zoo_tokenizer, TEXTS[3]))
    assert result.layers[0] == pytest.approx(1, abs=1e-3)
