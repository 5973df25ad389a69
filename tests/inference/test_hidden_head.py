"""A head that looks up hidden states is a kNN-LM, beside the memory's routing or alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers import tiny
from helpers.zoo import BUILD, encode, make_texts
from knn_moe import (
    BuildConfig,
    HeadConfig,
    RoutingMemory,
    attach,
    attach_all,
    build_memory,
    compress,
)
from knn_moe.errors import AttachError, MemoryFormatError
from knn_moe.index import IndexConfig
from knn_moe.inference.hidden_states import read_hidden_states
from knn_moe.memory.head_keys import HeadKeys
from knn_moe.methods import TaskContext
from knn_moe.methods.knn_lm import KnnLmConfig, prepare_knn_lm
from knn_moe.tasks import Task, TaskData, Text
from knn_moe.tasks.likelihood import token_losses

HEAD = HeadConfig(k=6, weight=0.4, gamma_scale=0.5, keys="hidden")
WORDS = ("mill", "bridge", "house", "tower")
IDS = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(3))


def with_head(
    model: PreTrainedModel, memory: RoutingMemory, head: HeadConfig = HEAD
) -> RoutingMemory:
    """Give a memory head keys, as calibration does."""
    keys = read_hidden_states(model, memory.reference_tokens(), memory.build.batch_tokens)
    manifest = replace(memory.manifest, routing=replace(memory.routing, head=head))
    found = HeadKeys.of(keys, memory.provenance)
    return replace(memory, manifest=manifest, head_keys=found, folder=None)


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor = IDS, **more: Any) -> Tensor:
    return model(ids, use_cache=False, **more).logits


@pytest.mark.slow
def test_alone_it_is_the_knn_lm_of_the_same_tokens(tiny_tokenizer: Any) -> None:
    model = tiny.trained("tiny-olmoe")
    rows = [{"text": f"The {word} stands by the river, as any {word} does."} for word in WORDS]
    data = TaskData(Task(name="w", title="W", kind=Text(), files="w"), rows, rows, "")
    context = TaskContext(model, tiny_tokenizer, data, "text", length=12, preset="paper")
    config = BuildConfig(steps=0, max_length=12)
    built = build_memory(model, tiny_tokenizer, context.examples, config)
    memory = with_head(model, built, replace(HEAD, k=5, alone=True))
    assert memory.head_keys is not None
    temperature = 1 / (memory.head_keys.gamma * HEAD.gamma_scale)
    rival = prepare_knn_lm(context, KnnLmConfig(k=5, weight=0.4, temperature=temperature))
    ids = torch.tensor([tiny_tokenizer("The bridge stands by the old mill")["input_ids"]])
    with rival.apply_to(model):
        expected = token_losses(model, ids, 1).nll
    with attach(model, memory):
        assert torch.equal(token_losses(model, ids, 1).nll, expected)
    assert not torch.allclose(token_losses(model, ids, 1).nll, expected)


def test_routing_and_head_are_the_routing_and_then_the_head(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    memory = with_head(zoo_olmoe, zoo_memory)
    with attach(zoo_olmoe, zoo_memory):
        routed = read(zoo_olmoe).log_softmax(dim=-1)
    with attach(zoo_olmoe, memory):
        mixed = read(zoo_olmoe)
        torch.testing.assert_close(read(zoo_olmoe, logits_to_keep=3), mixed[:, -3:])
    likelier = mixed > routed + 1e-4
    assert 0 < int(likelier.sum(dim=-1).max()) <= HEAD.k
    less = (mixed - routed)[~likelier]
    torch.testing.assert_close(less, torch.full_like(less, 0.6).log())
    assert not zoo_olmoe.get_output_embeddings()._forward_pre_hooks


def test_generation_with_a_cache_is_generation_without(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    memory = with_head(zoo_olmoe, zoo_memory, replace(HEAD, weight=0.95))
    asked: Any = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def written(**more: Any) -> list[list[int]]:
        mask = torch.ones_like(IDS)
        return zoo_olmoe.generate(IDS, attention_mask=mask, **asked, **more).tolist()

    alone = written()
    with attach(zoo_olmoe, memory):
        mixed = written()
        assert mixed == written(use_cache=False)
    assert alone == written() != mixed


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_compiled_it_says_the_same(
    alone: bool, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    with attach(zoo_olmoe, with_head(zoo_olmoe, zoo_memory, replace(HEAD, alone=alone))):
        expected = read(zoo_olmoe)
        compiled = torch.compile(zoo_olmoe, backend="eager", fullgraph=True)
        torch.testing.assert_close(read(compiled), expected)
        torch.testing.assert_close(read(compiled, IDS.flip(0)), expected.flip(0))


@pytest.mark.slow
def test_each_row_has_the_head_of_its_memory(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, zoo_memory: RoutingMemory
) -> None:
    other = build_memory(zoo_olmoe, zoo_tokenizer, make_texts(12, seed=5), BUILD)
    routed = replace(zoo_memory.routing, head=replace(HEAD, keys="router"))
    router = replace(zoo_memory, manifest=replace(zoo_memory.manifest, routing=routed))
    memories = {
        "both": with_head(zoo_olmoe, zoo_memory),
        "alone": with_head(zoo_olmoe, other, replace(HEAD, alone=True)),
        "router": router,
    }
    rows = torch.cat([IDS, IDS])
    expected = {None: read(zoo_olmoe, rows)}
    for name, memory in memories.items():
        with attach(zoo_olmoe, memory):
            expected[name] = read(zoo_olmoe, rows)
    names = ["alone", None, "both", "router"]
    with attach_all(zoo_olmoe, memories) as routing:
        torch.testing.assert_close(read(zoo_olmoe, rows), expected[None])
        with routing.using(names):
            mixed = read(zoo_olmoe, rows)
    for row, name in enumerate(names):
        torch.testing.assert_close(mixed[row], expected[name][row])


def test_two_heads_at_once_and_a_head_without_keys_are_refused(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    memory = with_head(zoo_olmoe, zoo_memory, replace(HEAD, alone=True))
    with attach(zoo_olmoe, memory), pytest.raises(AttachError, match="has a language-model head"):
        attach(zoo_olmoe, zoo_memory)
    with pytest.raises(MemoryFormatError, match="has no hidden states"):
        attach(zoo_olmoe, replace(memory, head_keys=None))


def test_memories_that_are_made_of_it_keep_its_keys(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, tmp_path: Path
) -> None:
    memory = with_head(zoo_olmoe, zoo_memory)
    assert memory.head_keys is not None
    assert memory.nbytes == zoo_memory.nbytes + memory.head_keys.nbytes
    memory.save_pretrained(tmp_path / "whole")
    opened = RoutingMemory.from_pretrained(tmp_path / "whole")
    assert opened.head_keys is not None
    assert torch.equal(opened.head_keys.keys, memory.head_keys.keys)
    assert opened.head_keys.gamma == memory.head_keys.gamma
    rows = torch.arange(0, len(memory), 2)
    half = opened.subset(rows)
    assert half.head_keys is not None
    assert torch.equal(half.head_keys.keys, memory.head_keys.keys[::2])
    assert half.head_keys.gamma == memory.head_keys.gamma
    merged = memory.merge(half)
    assert merged.head_keys is not None
    keys = memory.head_keys.keys
    assert torch.equal(merged.head_keys.keys, torch.cat([keys, keys[::2]]))
    fewer = memory.without([0])
    kept = memory.provenance.example != 0
    assert fewer.head_keys is not None
    assert torch.equal(fewer.head_keys.keys, memory.head_keys.keys[kept])
    with pytest.warns(UserWarning, match="different settings: head"):
        assert memory.merge(zoo_memory.subset(rows)).head_keys is None
    no_head = replace(memory, manifest=zoo_memory.manifest)
    no_head.save_pretrained(tmp_path / "no-head")
    assert RoutingMemory.from_pretrained(tmp_path / "no-head").head_keys is None


def test_damaged_keys_are_noticed(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, tmp_path: Path
) -> None:
    with_head(zoo_olmoe, zoo_memory).save_pretrained(tmp_path / "memory")
    file = tmp_path / "memory" / "head.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(MemoryFormatError, match="was edited"):
        RoutingMemory.from_pretrained(tmp_path / "memory")


def test_a_compressed_memory_keeps_its_head(
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    zoo_memory: RoutingMemory,
    tmp_path: Path,
) -> None:
    memory = with_head(zoo_olmoe, zoo_memory, replace(HEAD, k=64, alone=True))
    compress(memory, IndexConfig(kind="fast"), folder=tmp_path / "small")
    small = RoutingMemory.from_pretrained(tmp_path / "small")
    assert small.head_keys is not None
    ids = encode(zoo_tokenizer, make_texts(13)[12])
    alone = read(zoo_olmoe, ids).softmax(dim=-1)
    with attach(zoo_olmoe, memory):
        exact = read(zoo_olmoe, ids).exp()
    with attach(zoo_olmoe, small):
        found = read(zoo_olmoe, ids).exp()
    assert float((found - exact).abs().sum(dim=-1).mean()) < 0.2
    assert float((alone - exact).abs().sum(dim=-1).mean()) > 0.4
    small.save_pretrained(tmp_path / "again")
    again = RoutingMemory.from_pretrained(tmp_path / "again")
    with attach(zoo_olmoe, again):
        assert torch.equal(read(zoo_olmoe, ids).exp(), found)
