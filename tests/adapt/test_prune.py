"""A smaller memory: which cases stay, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import Result
from knn_moe.adapt.calibrate.splits import Slice, own_reference
from knn_moe.adapt.prune.by_values import FittedRouter, worth_by_values
from knn_moe.adapt.prune.recalled import Layer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import loss, model, sayings  # noqa: F401
from helpers.commands import knn_moe
from helpers.zoo import BUILD, family, make_texts
from knn_moe import (
    RoutingConfig,
    RoutingMemory,
    attach,
    build_memory,
    calibrate,
    compress,
    find_routers,
    prune,
)
from knn_moe.adapt.prune.by_loss import worth_by_loss
from knn_moe.adapt.prune.prune import _sizes, best
from knn_moe.equations.similarity import SIMILARITIES
from knn_moe.errors import (
    CalibrationError,
    ConfigError,
    MemoryFormatError,
    MemoryMismatchError,
    PruningError,
)
from knn_moe.index import leave_one_out
from knn_moe.recall.layer import layer_gamma
from knn_moe.recall.neighbours import Widths
from knn_moe.reference.provenance import owners
from knn_moe.reference.windows import TokenBatch
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks
from knn_moe.routers.own_logits import compute_own_logits

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def memory(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> RoutingMemory:
    config = replace(BUILD, steps=5, learning_rate=20.0)
    built = build_memory(model, tokenizer, sayings(24), config)
    routing = RoutingConfig(k=4, gamma_scale=0.5)
    return replace(built, manifest=replace(built.manifest, routing=routing))


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> RoutingMemory:
    """Of texts that repeat nothing, moved by one step: no two cases are as near as each other."""
    texts = [f"{number} {text}" for number, text in enumerate(make_texts(40), start=3)]
    built = build_memory(model, tokenizer, texts, replace(BUILD, learning_rate=1.0))
    routing = RoutingConfig(k=4, gamma_scale=0.5)
    return replace(built, manifest=replace(built.manifest, routing=routing))


def same_cases(one: RoutingMemory, other: RoutingMemory) -> bool:
    columns = vars(one.provenance)
    return all(
        torch.equal(getattr(one.provenance, name), getattr(other.provenance, name))
        for name in columns
    ) and all(
        torch.equal(layer.keys, other.layers[index].keys)
        and torch.equal(layer.values, other.layers[index].values)
        and layer.gamma == other.layers[index].gamma
        for index, layer in one.full_layers().items()
    )


def opened(memory: RoutingMemory, *indices: int) -> dict[int, Layer]:
    owner = owners(memory.provenance)[memory.provenance.window]
    routing = memory.routing
    return {
        index: Layer(
            memory.full_layers()[index],
            owner,
            Widths.of(layer_gamma(memory, index, routing, CPU).joint, index, routing),
            SIMILARITIES[routing.similarity],
            routing.k,
        )
        for index in indices
    }


def whole_reading(memory: RoutingMemory) -> Slice:
    owner = owners(memory.provenance)
    return Slice(own_reference(memory), list(range(len(owner))), owner)


# What a case is worth


class Weakened:
    """§4.2 written again, plainly, with a share of one case's part given to the router's own."""

    def __init__(self, layer: Layer, case: int, share: float) -> None:
        self.layer = layer
        self.case = case
        self.share = share
        self.owner = torch.empty(0)

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        keys, widths = self.layer.memory.keys, self.layer.widths
        distance = (inputs.detach()[:, None].double() - keys[None].double()).square().sum(dim=-1)
        distance[self.owner[:, None] == self.layer.owner[None]] = torch.inf
        near, rows = distance.topk(self.layer.k, largest=False)
        weight = torch.softmax(-widths.gamma * near, dim=-1)
        confidence_factor = torch.exp(-widths.confidence_gamma * near).mean(dim=-1, keepdim=True)
        mixed = logits * (1 - confidence_factor)
        for place in range(self.layer.k):
            share = torch.where(rows[:, place] == self.case, self.share, 0.0)[:, None]
            value = self.layer.memory.values[rows[:, place]].double()
            value = (1 - share) * value + share * logits
            mixed = mixed + confidence_factor * weight[:, place, None] * value
        return mixed


def doubled_loss(model: PreTrainedModel, batch: TokenBatch) -> float:
    """`summed_loss` rounds to fp32, which differences would feel."""
    logits = model(input_ids=batch.ids, attention_mask=batch.real.long(), use_cache=False).logits
    losses = -logits[:, :-1].log_softmax(dim=-1).gather(2, batch.ids[:, 1:, None])[..., 0]
    return float(losses[batch.scored[:, :-1]].sum())


@pytest.mark.parametrize("index", [0, 1])
def test_worth_is_what_the_loss_loses_without_the_case(index: int, plain: RoutingMemory) -> None:
    """Against differences of the loss itself, in doubles, one layer at a time."""
    model = family("olmoe").double()
    model.set_experts_implementation("eager")
    layers = opened(plain, index)
    router = next(router for router in find_routers(model) if router.layer == index)
    readings = list(whole_reading(plain).readings(64))
    worth = worth_by_loss(model, [router], layers, readings)

    def total(case: int, share: float) -> float:
        weakened = Weakened(layers[index], case, share)
        summed = 0.0
        with torch.no_grad(), install_hooks([RouterHook(router, weakened)]):
            for reading in readings:
                weakened.owner = reading.owner
                summed += doubled_loss(model, reading.batch)
        return summed

    step = 1e-3  # OLMoE's softmax is in fp32: a smaller one would show its rounding
    cases = [int(worth.argmax()), int(worth.argmin()), 7, 100]
    for case in cases:
        slope = (total(case, step) - total(case, -step)) / (2 * step)
        assert float(worth[case]) == pytest.approx(slope, rel=1e-2, abs=1e-3)
    assert worth.abs().max() > 1e-2


def test_a_case_brings_nothing_to_its_own_example(
    model: PreTrainedModel, memory: RoutingMemory
) -> None:
    """Read by one example alone, only other examples' cases are worth anything."""
    layers = opened(memory, 0, 1)
    reading = replace(whole_reading(memory), windows=[3])
    worth = worth_by_loss(model, find_routers(model), layers, list(reading.readings(64)))
    own = owners(memory.provenance)[3]
    mine = layers[0].owner == own
    assert (worth[mine] == 0).all()
    assert (worth[~mine] != 0).any()


def test_the_router_can_be_told_from_its_memory(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Values that were not moved are the router's own logits, and linear in the keys."""
    still = build_memory(model, tokenizer, make_texts(40), replace(BUILD, steps=0))
    for router in find_routers(model):
        layer = still.full_layers()[router.layer]
        fitted = FittedRouter(layer, CPU).logits(layer.keys)
        torch.testing.assert_close(
            fitted, compute_own_logits(router, layer.keys), atol=1e-3, rtol=1e-3
        )


def test_values_alone_say_much_the_same(model: PreTrainedModel, plain: RoutingMemory) -> None:
    """Of a memory that is hardly listened to, so that slopes are as they were when it was built."""
    manifest = replace(plain.manifest, routing=replace(plain.routing, confidence_factor=0.01))
    layers = opened(replace(plain, manifest=manifest), 1)
    readings = list(whole_reading(plain).readings(64))
    by_loss = worth_by_loss(model, find_routers(model)[1:], layers, readings)
    by_values = worth_by_values(layers, layers, CPU)
    assert float(torch.corrcoef(torch.stack([by_loss, by_values]))[0, 1]) > 0.8


# Which cases stay


def test_keeping_all_is_the_same_memory(model: PreTrainedModel, memory: RoutingMemory) -> None:
    for network in (model, None):
        kept = prune(network, memory, 1.0)
        assert same_cases(kept, memory)
        assert kept.manifest == memory.manifest


@pytest.mark.parametrize("with_model", [True, False])
def test_what_is_kept_is_as_it_was(
    model: PreTrainedModel, memory: RoutingMemory, tmp_path: Path, with_model: bool
) -> None:
    small = prune(model if with_model else None, memory, 0.25, folder=tmp_path / "small")
    assert len(small) == round(0.25 * len(memory))
    rows = torch.searchsorted(memory.provenance.key, small.provenance.key)
    for index, layer in small.full_layers().items():
        before = memory.full_layers()[index]
        assert torch.equal(layer.keys, before.keys[rows])
        assert torch.equal(layer.values, before.values[rows])
        assert layer.gamma == before.gamma
    assert torch.equal(small.provenance.stream, memory.provenance.stream)
    assert small.routing == memory.routing
    score = "loss" if with_model else "values"
    facts = {"cases": len(memory), "kept": len(small), "score": score, "rounds": 2}
    assert RoutingMemory.from_pretrained(tmp_path / "small").manifest.pruned == facts


def test_a_pruned_memory_is_worth_more_than_one_of_any_cases(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, memory: RoutingMemory
) -> None:
    fresh = sayings(60)[24:]
    chance = torch.Generator().manual_seed(0)
    drawn = [torch.randperm(len(memory), generator=chance)[: len(memory) // 4] for _ in range(5)]
    losses = {"alone": loss(model, tokenizer, fresh)}
    memories = {"loss": prune(model, memory, 0.25), "values": prune(None, memory, 0.25)}
    memories |= {str(n): memory.subset(rows.sort().values) for n, rows in enumerate(drawn)}
    for name, each in memories.items():
        with attach(model, each):
            losses[name] = loss(model, tokenizer, fresh)
    random = sum(losses[str(number)] for number in range(5)) / 5
    assert losses["loss"] < random < losses["alone"]
    assert losses["values"] < random


def test_exact_repeats_go_first(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    start = "3 14 15 92 65 35 89 79"
    texts = [f"{start} {text}" for text in make_texts(12, shortest=8, longest=8)]
    built = build_memory(model, tokenizer, texts, BUILD)
    case = built.provenance.prefix_hash()
    distinct = len(case.unique())
    assert distinct <= 8 + 12 * 8 < len(built)
    for network in (model, None):
        small = prune(network, built, distinct / len(built))
        assert torch.equal(small.provenance.prefix_hash().sort().values, case.unique())


def test_of_repeats_the_worthiest_stays() -> None:
    worth = torch.tensor([1.0, 5.0, 3.0, -2.0, 4.0])
    case = torch.tensor([7, 8, 8, 9, 8])
    assert best(worth, case, 3).tolist() == [0, 1, 3]
    assert best(worth, case, 4).tolist() == [0, 1, 3, 4]
    assert best(worth, case, 1).tolist() == [1]


def test_steps_are_of_about_a_half() -> None:
    assert _sizes(1000, 600) == [600]
    assert _sizes(1000, 250) == [500, 250]
    assert _sizes(1000, 100) == [464, 215, 100]


def test_no_table_of_all_cases_by_all_is_made(
    plain: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches see blocks of keys: scores are made by the block, never for all."""
    layers = opened(plain, 0)
    expected = worth_by_values(layers, layers, CPU)
    seen: list[tuple[int, ...]] = []
    product = leave_one_out.dot_products

    def watched(x: Tensor, keys: Tensor) -> Tensor:
        seen.append((len(x), len(keys)))
        return product(x, keys)

    monkeypatch.setattr(leave_one_out, "dot_products", watched)
    monkeypatch.setattr("knn_moe.index.exact._KEYS", {"cpu": 64})
    monkeypatch.setattr("knn_moe.adapt.prune.by_values._ROWS", 32)
    found = worth_by_values(layers, layers, CPU)
    assert max(queries for queries, _ in seen) <= 32
    assert max(keys for _, keys in seen) <= 64
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_the_model_is_left_as_it_was(model: PreTrainedModel, memory: RoutingMemory) -> None:
    prune(model, memory, 0.5)
    assert not any(router.scope._forward_pre_hooks for router in find_routers(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.inference_mode():
        prune(model, memory, 0.5)


@pytest.mark.parametrize("similarity", ["rbf-unit", "cosine"])
def test_every_similarity(model: PreTrainedModel, memory: RoutingMemory, similarity: str) -> None:
    manifest = replace(memory.manifest, routing=RoutingConfig(k=3, similarity=similarity))
    assert len(prune(model, replace(memory, manifest=manifest), 0.5)) == len(memory) // 2


@pytest.mark.parametrize("keep", [0, -0.1, 1.5, float("nan")])
def test_a_share_that_is_none(memory: RoutingMemory, keep: float) -> None:
    with pytest.raises(ConfigError, match="keep must be above 0"):
        prune(None, memory, keep)


def test_what_cannot_be_pruned(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    tmp_path: Path,
) -> None:
    with attach(model, memory), pytest.raises(PruningError, match="memory attached"):
        prune(model, memory)
    one = build_memory(model, tokenizer, sayings(1), BUILD)
    with pytest.raises(PruningError, match="one example only"):
        prune(model, one)
    silent = replace(memory.manifest, routing=RoutingConfig(confidence_factor=0.0))
    with pytest.raises(PruningError, match="keep silent"):
        prune(model, replace(memory, manifest=silent))
    with pytest.raises(MemoryMismatchError, match="was built for"):
        prune(family("gpt_oss"), memory)
    small = compress(memory, "fast", tmp_path / "small")
    with pytest.raises(MemoryFormatError, match="no keys to work on"):
        prune(model, small)
    with pytest.raises(MemoryFormatError, match="exists already"):
        prune(None, memory, folder=tmp_path / "small")


def test_its_own_examples_judge_a_pruned_memory_no_more(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, memory: RoutingMemory
) -> None:
    small = prune(model, memory, 0.5)
    with pytest.raises(CalibrationError, match="cannot judge it"):
        calibrate(model, small)
    others = [text for text in sayings(90)[24:] if text not in sayings(24)]
    calibrate(model, small, others, tokenizer=tokenizer)


# The commands


def said(result: Result) -> str:
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def network(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(memory: RoutingMemory, tmp_path: Path) -> Path:
    memory.save_pretrained(tmp_path / "memory")
    return tmp_path / "memory"


def test_the_prune_command(network: Path, folder: Path, memory: RoutingMemory) -> None:
    done = knn_moe("prune", network, folder, "--keep", 0.25, "-o", folder.with_name("s"), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cases"] == round(0.25 * len(memory))
    assert "by loss" in knn_moe("inspect", folder.with_name("s")).stdout
    plain = knn_moe("prune", folder, "--keep", 0.5, "--by", "chance")
    assert plain.exit_code == 0, plain.output
    assert len(RoutingMemory.from_pretrained(f"{folder}-pruned")) == round(0.5 * len(memory))
    for arguments, message in (
        ((folder, "--by", "chance", "--keep", 2, "-o", folder.with_name("t")), "keep must be"),
        ((folder, "--by", "chance"), "exists already"),
        ((folder, "-o", folder.with_name("t")), "Pruning by loss needs the model"),
        ((network, folder, folder, "-o", folder.with_name("t")), "a model and a memory"),
    ):
        refused = knn_moe("prune", *arguments)
        assert refused.exit_code == 2
        assert message in said(refused)
    assert not folder.with_name("t").exists()
