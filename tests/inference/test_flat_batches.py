"""Continuous batching: sequences of several requests in one flat row, counted and routed apart."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from helpers.near_ties import assert_no_near_ties
from helpers.zoo import BUILD, family, make_texts
from knn_moe import HeadConfig, RoutingConfig, RoutingMemory, attach, attach_all, build_memory
from knn_moe.bench.uses import distilled_memory
from knn_moe.errors import AttachError, ConfigError, NothingReadError
from knn_moe.inference.changing import ChangingMemories
from knn_moe.recall.stacked_prototypes import StackedPrototypes

NAMES = ("medicine", "law")
NEW = 4
PROMPTS = [
    torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length)).tolist()[0]
    for length in (5, 9, 7)
]
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return family("olmoe")


@pytest.fixture(scope="module")
def memories(model: PreTrainedModel, zoo_tokenizer: Any) -> dict[str, RoutingMemory]:
    config = replace(BUILD, learning_rate=20.0)
    texts = [make_texts(12, seed=seed) for seed in range(2)]
    built = (build_memory(model, zoo_tokenizer, part, config) for part in texts)
    return dict(zip(NAMES, built, strict=True))


def generate_flat(model: PreTrainedModel) -> list[list[int]]:
    """The new tokens of all prompts, in one flat batch after the other."""
    outputs = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(**GREEDY),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=16, page_size=16, max_batch_tokens=64, allow_block_sharing=False
        ),
        warmup=False,
    )
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.skipif(
    "page_size" not in inspect.signature(ContinuousBatchingConfig).parameters,
    reason="the continuous batching of this transformers is another",
)
@pytest.mark.parametrize("spare", [False, True])
def test_stats_count_as_in_generate(
    model: PreTrainedModel, memories: dict[str, RoutingMemory], spare: bool
) -> None:
    config = RoutingConfig(spare_first_token=spare)
    for prompt in PROMPTS:
        assert_no_near_ties(model, memories["law"], torch.tensor([prompt]), config)
    with attach(model, memories["law"], config) as routing:
        said = [
            model.generate(
                torch.tensor([prompt]), **{**GREEDY, "eos_token_id": None}, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
        expected = routing.stats()
    with attach(model, memories["law"], config) as routing:
        assert generate_flat(model) == said
        stats = routing.stats()
        read_flat(model)
        with pytest.raises(NothingReadError, match="flat batch"):
            routing.explain()
    read = sum(len(prompt) + NEW - 1 - spare for prompt in PROMPTS)
    for layer, one in stats.items():
        assert one.tokens == expected[layer].tokens == read
        assert one.calls == NEW
        assert one.mean_confidence == pytest.approx(expected[layer].mean_confidence, abs=1e-5)
        assert one.changed == pytest.approx(expected[layer].changed)


@torch.no_grad()
def read_flat(
    model: PreTrainedModel,
    padding: int = 0,
    prompts: Sequence[list[int]] = PROMPTS,
    **options: Any,
) -> Tensor:
    """Read all prompts as one row, each seeing itself only, with padding behind. [T, V]."""
    lengths = [len(prompt) for prompt in prompts]
    blocks = [*(torch.ones(n, n).tril() for n in lengths), torch.eye(padding)]
    mask = torch.zeros(sum(lengths) + padding, sum(lengths) + padding)
    mask = mask.masked_fill(torch.block_diag(*blocks) == 0, float("-inf"))
    ids = torch.tensor([[token for prompt in [*prompts, [0] * padding] for token in prompt]])
    positions = torch.cat([*map(torch.arange, lengths), torch.zeros(padding)]).long()[None]
    return model(
        ids,
        attention_mask=mask[None, None],
        position_ids=positions,
        cu_seq_lens_q=torch.tensor([0, *torch.tensor(lengths).cumsum(0)]),
        use_cache=False,
        **options,
    ).logits[0]


def read_alone(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt]), use_cache=False).logits[0]


@pytest.mark.parametrize("head", [None, HeadConfig(keys="router", weight=0.5, k=8)])
@pytest.mark.parametrize("padding", [0, 5])
def test_each_sequence_has_its_own_memory(
    model: PreTrainedModel,
    memories: dict[str, RoutingMemory],
    head: HeadConfig | None,
    padding: int,
) -> None:
    names = ["law", None, "medicine"]
    config = RoutingConfig(head=head)
    expected = []
    for name, prompt in zip(names, PROMPTS, strict=True):
        if name is None:
            expected.append(read_alone(model, prompt))
            continue
        assert_no_near_ties(model, memories[name], torch.tensor([prompt]), config)
        with attach(model, memories[name], config) as routing:
            expected.append(read_alone(model, prompt))
            alone = routing.stats()
    handle = ChangingMemories(model).installed()
    with handle:
        for name, memory in memories.items():
            handle.add(handle.open(name, memory, config))
        lengths = [len(prompt) for prompt in PROMPTS]
        with handle.using_flat(list(zip(names, lengths, strict=True))):
            found = read_flat(model, padding)[: sum(lengths)].log_softmax(-1)
            last = torch.tensor(lengths).cumsum(0) - 1
            kept = read_flat(model, padding, logits_to_keep=last).log_softmax(-1)
        stats = handle.stats()
    torch.testing.assert_close(found, torch.cat(expected).log_softmax(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kept, found[last], atol=1e-4, rtol=1e-4)
    for layer, one in stats["medicine"].items():
        assert (one.tokens, one.calls) == (2 * alone[layer].tokens, 2)
        assert one.mean_confidence == pytest.approx(alone[layer].mean_confidence, abs=1e-5)


def test_each_memory_searches_its_own_tokens_only(
    model: PreTrainedModel,
    memories: dict[str, RoutingMemory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[int] = []
    with attach_all(model, memories) as routing:
        for hook in routing.recall_hooks():
            search = hook.recall.forward

            def forward(inputs: Tensor, *rest: Any, search: Any = search) -> Any:
                searched.append(len(inputs))
                return search(inputs, *rest)

            monkeypatch.setattr(hook.recall, "forward", forward)
        with routing.using_flat([("law", 5), (None, 9), ("medicine", 7)]):
            read_flat(model)
    assert sorted(set(searched)) == [5, 7]
    assert len(searched) == 2 * 2


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("spare", [False, True])
def test_distilled_memories_are_recalled_together(
    model: PreTrainedModel,
    memories: dict[str, RoutingMemory],
    monkeypatch: pytest.MonkeyPatch,
    spare: bool,
    padding: int,
) -> None:
    """As each one alone, also after one has gone, with one call for all."""
    config = RoutingConfig(spare_first_token=spare)
    distilled = {
        name: distilled_memory(memories["law"], 4 + seed, seed)
        for seed, name in enumerate(("a", "b", "gone", "c"))
    }
    names = ["c", None, "a", "b", "c"]
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[1]]
    expected, stats = [], {}
    for name, prompt in zip(names, prompts, strict=True):
        if name is None:
            expected.append(read_alone(model, prompt))
            continue
        with attach(model, distilled[name], config) as routing:
            expected.append(read_alone(model, prompt))
            stats[name] = routing.stats()
    together: list[int] = []
    forward = StackedPrototypes.forward

    def count(stacked: StackedPrototypes, inputs: Tensor, *rest: Any) -> Any:
        together.append(len(inputs))
        return forward(stacked, inputs, *rest)

    monkeypatch.setattr(StackedPrototypes, "forward", count)
    handle = ChangingMemories(model).installed()
    lengths = [len(prompt) for prompt in prompts]
    with handle:
        for name, memory in distilled.items():
            handle.add(handle.open(name, memory, config))
        handle.remove("gone")
        torch.testing.assert_close(read_alone(model, PROMPTS[1]), expected[1])  # nothing is chosen
        with handle.using_flat(list(zip(names, lengths, strict=True))):
            found = read_flat(model, padding, prompts)[: sum(lengths)]
        seen = handle.stats()
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)
    assert len(together) == len(memories["law"].layers)
    for name in "ab":  # each has one sequence
        for layer, one in seen[name].items():
            alone = stats[name][layer]
            assert (one.calls, one.tokens, one.changed) == (1, alone.tokens, alone.changed)
            assert one.mean_confidence == pytest.approx(alone.mean_confidence, abs=1e-5)


def test_memories_come_and_go(model: PreTrainedModel, memories: dict[str, RoutingMemory]) -> None:
    alone = read_alone(model, PROMPTS[0])
    before = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    config = RoutingConfig(head=HeadConfig(keys="router", weight=0.5, k=8))
    with ChangingMemories(model).installed() as routing:
        assert torch.equal(read_alone(model, PROMPTS[0]), alone)
        routing.add(routing.open("law", memories["law"], config))
        with pytest.raises(ConfigError, match="a memory 'law' already"):
            routing.open("law", memories["law"], config)
        with routing.using("law"):
            first = read_alone(model, PROMPTS[0])
        assert not torch.equal(first, alone)
        routing.add(routing.open("medicine", memories["medicine"], RoutingConfig()))
        with routing.using("law"):
            assert torch.equal(read_alone(model, PROMPTS[0]), first)
        routing.remove("law")
        assert list(routing.stats()) == ["medicine"]
        with pytest.raises(ConfigError, match="Unknown memory 'law'"), routing.using("law"):
            pass
        with routing.using("medicine"):
            assert not torch.equal(read_alone(model, PROMPTS[0]), alone)
        routing.remove("medicine")
        assert torch.equal(read_alone(model, PROMPTS[0]), alone)
        with pytest.raises(AttachError, match="has a memory attached already"):
            ChangingMemories(model)
    after = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    assert after == before


def test_too_few_tokens_are_named(
    model: PreTrainedModel, memories: dict[str, RoutingMemory]
) -> None:
    with (
        attach_all(model, memories) as routing,
        routing.using_flat([("law", 50)]),
        pytest.raises(ConfigError, match="chosen for 50 tokens, and the model reads 21"),
    ):
        read_flat(model)
