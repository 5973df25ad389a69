"""A memory's head: the mixture of a plain loop, for the rows it is for, and nothing left of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.families import FAMILIES
from helpers.near_ties import assert_no_near_ties
from helpers.zoo import BUILD, encode, family, make_texts
from knn_moe import (
    HeadConfig,
    IndexConfig,
    RoutingConfig,
    RoutingMemory,
    attach,
    attach_all,
    build_memory,
    compress,
    control,
    find_routers,
)
from knn_moe.equations.next_token import mix_next_token
from knn_moe.errors import ConfigError, RouterNotCalledError, UnsupportedModelError
from knn_moe.reference.provenance import Provenance, concatenate

HEAD = HeadConfig(k=6, weight=0.4, gamma_scale=0.5)
IDS = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True, scope="module")
def no_near_ties(zoo_memory: RoutingMemory) -> None:
    """Many of these tests compare two computations of one recall."""
    assert_no_near_ties(family("olmoe"), zoo_memory, IDS, with_head(zoo_memory))


def with_head(memory: RoutingMemory, head: HeadConfig | None = HEAD, **more: Any) -> RoutingConfig:
    return replace(memory.routing, head=head, **more)


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor = IDS, **more: Any) -> Tensor:
    return model(ids, use_cache=False, **more).logits


@torch.no_grad()
def slow_head(model: PreTrainedModel, memory: RoutingMemory, head: HeadConfig) -> Tensor:
    """p(y | x) with the memory on, by a loop over every case of the last layer."""
    last = max(memory.layers)
    seen: list[Tensor] = []

    def keep(call: Any) -> None:
        if call.layer == last:
            seen.append(call.inputs)

    with attach(model, memory) as routing, routing.observed(keep):
        logits = read(model)
    layer, source = memory.full_layers()[last], memory.provenance
    ends = (source.begin[1:] - 1).tolist()
    rows = []
    for query, own in zip(seen[0], logits.flatten(0, 1), strict=True):
        near = sorted(
            (float((query - key).square().sum()), place)
            for key, place in zip(layer.keys, source.key.tolist(), strict=True)
        )[: head.k]
        told = [(d, int(source.stream[place + 1])) for d, place in near if place not in ends]
        scale = layer.gamma * head.gamma_scale
        share = torch.softmax(torch.tensor([-d * scale for d, _ in told]), dim=0)
        row = (1 - head.weight) * own.softmax(dim=0)
        for part, (_, token) in zip(share, told, strict=True):
            row[token] += head.weight * part
        rows.append(row)
    return torch.stack(rows).view(logits.shape)


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "gpt_oss"])
def test_it_is_the_mixture_of_a_plain_loop(
    name: str, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = family(name)
    memory = build_memory(model, zoo_tokenizer, make_texts(12), BUILD)
    alone = read(model)
    expected = slow_head(model, memory, HEAD)
    with attach(model, memory, with_head(memory)):
        mixed = read(model)
    torch.testing.assert_close(mixed.exp(), expected, rtol=1e-3, atol=1e-6)
    assert torch.equal(read(model), alone)
    assert not model._forward_hooks
    assert not any(router.scope._forward_pre_hooks for router in find_routers(model))


def test_what_has_no_next_token_says_nothing() -> None:
    stream = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32)
    numbers = torch.tensor([0, 1], dtype=torch.int32)
    begin, key = torch.tensor([0, 3, 5]), torch.tensor([0, 2, 3, 4])
    one = Provenance(stream, begin, numbers, torch.zeros(2, dtype=torch.int32), key)
    assert one.following.tolist() == [6, -1, 9, -1]
    assert concatenate([one, one]).following.tolist() == [6, -1, 9, -1] * 2
    logits = torch.randn(2, 12)
    distance = torch.tensor([[1.0, float("inf")], [float("inf")] * 2])
    mixed = mix_next_token(logits, distance, torch.tensor([[3, 0], [0, 0]]), 0.4, 1.0)
    plain = logits.softmax(dim=-1)
    expected = 0.6 * plain[0] + 0.4 * torch.eye(12)[3]
    torch.testing.assert_close(mixed[0].exp(), expected)
    torch.testing.assert_close(mixed[1].exp(), plain[1])


def test_no_weight_is_no_head(zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory) -> None:
    with attach(zoo_olmoe, zoo_memory):
        expected = read(zoo_olmoe)
    with attach(zoo_olmoe, zoo_memory, with_head(zoo_memory, replace(HEAD, weight=0.0))):
        assert torch.equal(read(zoo_olmoe), expected)
    assert with_head(zoo_memory).head == RoutingConfig(**with_head(zoo_memory).to_dict()).head


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.name)
def test_every_family_has_the_inputs_of_its_logits(entry: Any) -> None:
    """Each family gives its routers tokens in the order of its logits, of which some are kept."""
    model = entry.build()
    tokenizer = _numbers()
    memory = build_memory(model, tokenizer, make_texts(4), BUILD)
    sure = HeadConfig(k=1, weight=0.999, gamma_scale=1.0)
    ids = encode(tokenizer, make_texts(1, seed=2)[0])
    with attach(model, memory, with_head(memory, sure)):
        mixed = read(model, ids)
    expected = _followers(model, memory, ids)
    likeliest = mixed[0].argmax(dim=-1)
    known = expected >= 0
    assert known.any()
    assert torch.equal(likeliest[known], expected[known])


def _numbers() -> PreTrainedTokenizerFast:
    from knn_moe.bench.models import number_tokenizer

    return number_tokenizer(128)


def _followers(model: PreTrainedModel, memory: RoutingMemory, ids: Tensor) -> Tensor:
    """What followed the last layer's nearest case to each token [T], -1 if nothing did."""
    from knn_moe.explain.trace import trace

    with attach(model, memory) as routing:
        rows = trace(model, routing, ids)[max(routing.stats())].rows
    return memory.provenance.following[rows[:, 0]]


def test_generation_with_a_cache_is_generation_without(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    def written(**more: Any) -> list[list[int]]:
        ids = IDS[:, :6]
        kept = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        return zoo_olmoe.generate(ids, max_new_tokens=8, eos_token_id=None, **kept, **more).tolist()

    alone = written()
    with attach(zoo_olmoe, zoo_memory, with_head(zoo_memory, replace(HEAD, weight=0.95))):
        mixed = written()
        assert mixed == written(use_cache=False)
        some = read(zoo_olmoe, logits_to_keep=3)
        torch.testing.assert_close(some, read(zoo_olmoe)[:, -3:])
        chosen = torch.tensor([1, 4])
        torch.testing.assert_close(
            read(zoo_olmoe, logits_to_keep=chosen), read(zoo_olmoe)[:, chosen]
        )
    assert mixed != alone
    assert written() == alone


@pytest.mark.slow
def test_compiled_it_says_the_same(zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory) -> None:
    with attach(zoo_olmoe, zoo_memory, with_head(zoo_memory)):
        expected = read(zoo_olmoe)
        compiled = torch.compile(zoo_olmoe, backend="eager", fullgraph=True)
        torch.testing.assert_close(read(compiled), expected)
        torch.testing.assert_close(read(compiled, IDS.flip(0)), expected.flip(0))


def test_each_row_has_the_head_of_its_memory(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, zoo_memory: RoutingMemory
) -> None:
    other = build_memory(zoo_olmoe, zoo_tokenizer, make_texts(12, seed=5), BUILD)
    memories = {"sayings": zoo_memory, "others": other}
    configs = {
        "sayings": with_head(zoo_memory),
        "others": with_head(other, replace(HEAD, weight=0.9)),
    }
    rows = torch.cat([IDS, IDS[:1]])
    alone = {None: read(zoo_olmoe, rows)}
    for name, each in memories.items():
        with attach(zoo_olmoe, each, configs[name]):
            alone[name] = read(zoo_olmoe, rows)
    assert not torch.allclose(alone["sayings"], alone["others"])
    with attach_all(zoo_olmoe, memories, configs) as routing:
        torch.testing.assert_close(read(zoo_olmoe, rows), alone[None])
        names = ["others", None, "sayings"]
        with routing.using(names):
            mixed = read(zoo_olmoe, rows)
    for row, name in enumerate(names):
        torch.testing.assert_close(mixed[row], alone[name][row])


MANY = replace(HEAD, k=64)


def apart(found: Tensor, expected: Tensor) -> float:
    """The mean total variation of two predictions, logits each."""
    change = found.softmax(dim=-1) - expected.softmax(dim=-1)
    return float(change.abs().sum(dim=-1).mean() / 2)


@pytest.mark.parametrize("kind", ["fast", "faiss-flat"])
def test_any_index_serves_it(
    kind: str,
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    zoo_memory: RoutingMemory,
) -> None:
    if kind == "faiss-flat":
        pytest.importorskip("faiss")
    ids = encode(zoo_tokenizer, make_texts(13)[12])
    with attach(zoo_olmoe, zoo_memory, with_head(zoo_memory, MANY)):
        exact = read(zoo_olmoe, ids)
    with attach(zoo_olmoe, zoo_memory, with_head(zoo_memory, MANY, index=IndexConfig(kind=kind))):
        assert apart(read(zoo_olmoe, ids), exact) < 0.1
    assert apart(read(zoo_olmoe, ids), exact) > 0.2


def test_a_compressed_memory_keeps_its_head(
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    zoo_memory: RoutingMemory,
    tmp_path: Path,
) -> None:
    manifest = replace(zoo_memory.manifest, routing=with_head(zoo_memory, MANY))
    asked = replace(zoo_memory, manifest=manifest, folder=None)
    compress(asked, IndexConfig(kind="fast"), folder=tmp_path / "small")
    small = RoutingMemory.from_pretrained(tmp_path / "small")
    assert small.routing.head == MANY
    ids = encode(zoo_tokenizer, make_texts(13)[12])
    with attach(zoo_olmoe, asked):
        exact = read(zoo_olmoe, ids)
    with attach(zoo_olmoe, small):
        assert apart(read(zoo_olmoe, ids), exact) < 0.1


def test_a_control_has_none(zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory) -> None:
    """It would go on telling what followed, and what a control takes away would not be missed."""
    manifest = replace(zoo_memory.manifest, routing=with_head(zoo_memory))
    asked = replace(zoo_memory, manifest=manifest)
    for kind in ("shuffled", "random", "own-logits"):
        assert control(asked, kind, zoo_olmoe).routing.head is None
    assert asked.routing.head == HEAD


def test_logits_that_cannot_be_had_are_refused(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    with (
        attach(zoo_olmoe, zoo_memory, with_head(zoo_memory)),
        pytest.raises(UnsupportedModelError, match="return_dict=True"),
    ):
        zoo_olmoe(IDS, use_cache=False, return_dict=False)
    with (
        attach(zoo_olmoe, zoo_memory, with_head(zoo_memory)),
        pytest.raises(UnsupportedModelError, match="cannot be matched"),
    ):
        zoo_olmoe(IDS, use_cache=False, logits_to_keep=torch.tensor([1, 4]).view(1, 2))


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"weight": 1.0}, {"weight": -0.1}, {"gamma_scale": 0}, {"keys": "x"}]
)
def test_a_head_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"head's {next(iter(wrong))}"):
        HeadConfig(**wrong)
    with pytest.raises(ConfigError, match="head must be"):
        RoutingConfig(head="yes")  # type: ignore[arg-type]


def test_without_routing_it_mixes_into_the_model_alone(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    alone = read(zoo_olmoe).log_softmax(dim=-1)
    off = with_head(zoo_memory, confidence_factor=0.0)
    only = with_head(zoo_memory, replace(HEAD, alone=True))
    with attach(zoo_olmoe, zoo_memory, off):
        mixed = read(zoo_olmoe)
    with attach(zoo_olmoe, zoo_memory, only) as routing:
        assert torch.equal(read(zoo_olmoe), mixed)
        (stats,) = routing.stats().values()
        assert stats.mean_confidence == 0
    # What no case was followed by has lost the head's share of its probability, and no more.
    lost = (mixed - alone).flatten(0, 1)
    assert float(lost.min()) == pytest.approx(math.log(1 - HEAD.weight), abs=1e-5)
    assert float(lost.max()) > 0
    assert only.for_layer(0).confidence_factor == 0
    assert replace(only, head=None).for_layer(0).confidence_factor == 1


def test_no_more_cases_than_there_are(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    heads = (replace(HEAD, k=len(zoo_memory)), replace(HEAD, k=5 * len(zoo_memory)))
    found = []
    for head in heads:
        with attach(zoo_olmoe, zoo_memory, with_head(zoo_memory, head)):
            found.append(read(zoo_olmoe))
    assert torch.equal(*found)


def test_gradients_pass_through_it(zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory) -> None:
    weight = zoo_olmoe.get_output_embeddings().weight
    with attach(zoo_olmoe, zoo_memory, with_head(zoo_memory)):
        logits = zoo_olmoe(IDS, use_cache=False).logits
    (slope,) = torch.autograd.grad(logits[0, 3, 7], weight)
    assert slope.abs().max() > 0


def test_padding_makes_no_difference(zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory) -> None:
    padded = torch.cat([torch.zeros(2, 3, dtype=IDS.dtype), IDS], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long().expand(2, -1)
    places = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    with attach(zoo_olmoe, zoo_memory, with_head(zoo_memory)):
        expected = read(zoo_olmoe)
        found = read(zoo_olmoe, padded, attention_mask=mask, position_ids=places)[:, 3:]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_what_a_run_left_behind_is_no_part_of_the_next(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    """The decoder run by itself, and a forward that is compiled while the call around it is not."""
    with attach(zoo_olmoe, zoo_memory, with_head(zoo_memory)):
        expected = read(zoo_olmoe)
        with torch.no_grad():
            zoo_olmoe.model(IDS.flip(0), use_cache=False)
        whole = zoo_olmoe.forward
        zoo_olmoe.forward = torch.compile(whole, backend="eager")  # type: ignore[method-assign]
        try:
            torch.testing.assert_close(read(zoo_olmoe), expected)
        finally:
            zoo_olmoe.forward = whole  # type: ignore[method-assign]


def test_a_head_that_no_logits_came_to_is_told(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    routing = attach(zoo_olmoe, zoo_memory, with_head(zoo_memory))
    with torch.no_grad():
        zoo_olmoe.forward(IDS, use_cache=False)
    with pytest.raises(
        RouterNotCalledError, match="without calling the memory's language-model head"
    ):
        routing.detach()
    assert not zoo_olmoe._forward_hooks
    assert not zoo_olmoe._forward_pre_hooks
