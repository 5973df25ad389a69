"""The first token of each sequence can be left to the router, however the model is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache

from helpers.families import FAMILIES, Family
from helpers.zoo import encode, make_texts
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory
from knn_moe.config import BuildConfig
from knn_moe.recall.layer import RouterCall

SPARING = RoutingConfig(k=3, spare_first_token=True)


def spared_tokens(
    model: nn.Module, memory: RoutingMemory, run: Callable[[], object], config: RoutingConfig
) -> list[Tensor]:
    """Return of each call of the first router which tokens had a λ of 0."""
    calls: list[Tensor] = []

    def observe(call: RouterCall) -> None:
        if call.layer == 0:
            calls.append(call.confidence == 0)
            same = call.mixed[call.confidence == 0] == call.logits[call.confidence == 0]
            assert bool(same.all())

    with torch.no_grad(), attach(model, memory, config) as routing, routing.observed(observe):
        run()
    return calls


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(3, 21).view(2, 9)


def test_only_the_first_tokens_are_left_to_the_router(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, ids: Tensor
) -> None:
    def run() -> object:
        return zoo_olmoe(ids, use_cache=False)

    (spared,) = spared_tokens(zoo_olmoe, zoo_memory, run, SPARING)
    assert spared.nonzero().flatten().tolist() == [0, 9]
    (spared,) = spared_tokens(zoo_olmoe, zoo_memory, run, RoutingConfig(k=3))
    assert not spared.any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_comes_before_no_first_token(
    side: str, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, ids: Tensor
) -> None:
    mask = torch.ones_like(ids)
    place = slice(3) if side == "left" else slice(-3, None)
    mask[1, place] = 0
    expected = [0, 9 + 3 * (side == "left")]
    for run in (
        lambda: zoo_olmoe(ids, attention_mask=mask, use_cache=False),
        lambda: zoo_olmoe.generate(ids, attention_mask=mask, max_new_tokens=1, eos_token_id=None),
    ):
        (spared,) = spared_tokens(zoo_olmoe, zoo_memory, run, SPARING)
        assert spared.nonzero().flatten().tolist() == expected


def test_sequences_that_share_a_row_begin_at_position_0(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, ids: Tensor
) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])

    def run() -> object:
        return zoo_olmoe(ids, position_ids=positions, use_cache=False)

    (spared,) = spared_tokens(zoo_olmoe, zoo_memory, run, SPARING)
    assert spared.nonzero().flatten().tolist() == [0, 4, 7, 9, 13, 16]


@pytest.mark.parametrize("static", [False, True])
def test_what_continues_a_cache_has_no_first_token(
    static: bool, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, ids: Tensor
) -> None:
    cache = StaticCache(zoo_olmoe.config, max_cache_len=16) if static else DynamicCache()

    def run() -> None:
        for part in ids.split([4, 4, 1], dim=1):
            zoo_olmoe(part, past_key_values=cache)

    spared = spared_tokens(zoo_olmoe, zoo_memory, run, SPARING)
    assert [call.nonzero().flatten().tolist() for call in spared] == [[0, 4], [], []]


@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_of_one_token(
    static: bool, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, ids: Tensor
) -> None:
    cache = "static" if static else None

    def run() -> object:
        return zoo_olmoe.generate(
            ids[:, :1], max_new_tokens=3, eos_token_id=None, cache_implementation=cache
        )

    spared = spared_tokens(zoo_olmoe, zoo_memory, run, SPARING)
    assert [call.nonzero().flatten().tolist() for call in spared] == [[0, 1], [], []]


@pytest.mark.parametrize("start", [0, 5], ids=["padding counted", "offset"])
def test_positions_that_do_not_begin_at_0(
    start: int, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, ids: Tensor
) -> None:
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = torch.arange(start, start + 9)[None]

    def run() -> object:
        return zoo_olmoe(ids, attention_mask=mask, position_ids=positions, use_cache=False)

    (spared,) = spared_tokens(zoo_olmoe, zoo_memory, run, SPARING)
    assert spared.nonzero().flatten().tolist() == [0, 12]


def test_generation_spares_the_prompts_first_token_alone(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, ids: Tensor
) -> None:
    def run() -> object:
        mask = torch.ones_like(ids)
        return zoo_olmoe.generate(ids, attention_mask=mask, max_new_tokens=3, eos_token_id=None)

    spared = spared_tokens(zoo_olmoe, zoo_memory, run, SPARING)
    assert [call.nonzero().flatten().tolist() for call in spared] == [[0, 9], [], []]


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.name)
def test_every_family(entry: Family, zoo_tokenizer: object, ids: Tensor) -> None:
    model = entry.build()
    build = BuildConfig(steps=1, max_length=32)
    memory = build_memory(model, zoo_tokenizer, make_texts(4, seed=2), build)
    spared: dict[int, list[int]] = {}

    def observe(call: RouterCall) -> None:
        spared[call.layer] = (call.confidence == 0).nonzero().flatten().tolist()

    with torch.no_grad(), attach(model, memory, SPARING) as routing, routing.observed(observe):
        model(ids, use_cache=False)
    assert spared == {layer: [0, 9] for layer in memory.layers}


def test_the_first_token_alone_is_what_it_was(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, zoo_tokenizer: object
) -> None:
    """Its logits are the model's own; those of the tokens after it are not."""
    ids = encode(zoo_tokenizer, make_texts(1, seed=9)[0])
    with torch.no_grad():
        before = zoo_olmoe(ids, use_cache=False).logits
        with attach(zoo_olmoe, zoo_memory, SPARING):
            after = zoo_olmoe(ids, use_cache=False).logits
    torch.testing.assert_close(before[:, 0], after[:, 0])
    assert not torch.allclose(before[:, 1:], after[:, 1:], atol=1e-3)


@pytest.mark.slow
def test_a_compiled_model_spares_it_too(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, ids: Tensor
) -> None:
    with torch.no_grad(), attach(zoo_olmoe, zoo_memory, SPARING):
        expected = zoo_olmoe(ids, use_cache=False).logits
        compiled = torch.compile(zoo_olmoe, backend="eager")
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)


def test_a_memory_keeps_the_setting(zoo_memory: RoutingMemory, tmp_path: Path) -> None:
    manifest = replace(zoo_memory.manifest, routing=SPARING)
    replace(zoo_memory, manifest=manifest).save_pretrained(tmp_path / "memory")
    assert RoutingMemory.from_pretrained(tmp_path / "memory").routing.spare_first_token
