"""Pruning: which cases stay, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, mean_loss, sayings
from helpers.commands import run_cli
from helpers.memories import same_cases
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
from knn_moe.adapt.prune.by_loss import ScoredRecall, score_by_loss
from knn_moe.adapt.prune.prune import _halving_sizes, best_rows
from knn_moe.build.build import reference_tokens
from knn_moe.errors import (
    AttachError,
    CalibrationError,
    ConfigError,
    MemoryFormatError,
    MemoryMismatchError,
    PruningError,
)
from knn_moe.recall.leave_one_out import Cases
from knn_moe.reference.examples import Example
from knn_moe.reference.provenance import owners
from knn_moe.reference.windows import Batch
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks


@pytest.fixture(scope="module")
def distinct_memory(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> RoutingMemory:
    """Of texts that repeat nothing, moved by one step: no two cases are equally near."""
    texts = [f"{number} {text}" for number, text in enumerate(make_texts(40), start=3)]
    built = build_memory(olmoe, zoo_tokenizer, texts, replace(BUILD, learning_rate=1.0))
    routing = RoutingConfig(k=4, gamma_scale=0.5)
    return replace(built, manifest=replace(built.manifest, routing=routing))


def open_recalls(model: PreTrainedModel, memory: RoutingMemory) -> list[ScoredRecall]:
    """Recall as the memory's routing does, in every layer."""
    owner = owners(memory.provenance)[memory.provenance.window]
    recalls = []
    for router in find_routers(model):
        layer = memory.full_layers()[router.layer]
        cases = Cases(router, layer.keys, layer.values, owner, layer.gamma)
        recalls.append(ScoredRecall(cases, memory.routing))
    return recalls


class Weakened:
    """§4.2 written out plainly, with a share of one case's part given to the router's logits."""

    def __init__(self, recall: ScoredRecall, case: int, share: float) -> None:
        self.cases, self.widths, self.k = recall.cases, recall.widths, recall.k
        self.case = case
        self.share = share
        self.owner = torch.empty(0)

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        keys = self.cases.keys
        distance = (inputs.detach()[:, None].double() - keys[None].double()).square().sum(dim=-1)
        distance[self.owner[:, None] == self.cases.owner[None]] = torch.inf
        near, rows = distance.topk(self.k, largest=False)
        weight = torch.softmax(-self.widths.gamma * near, dim=-1)
        confidence = torch.exp(-self.widths.confidence_gamma * near).mean(dim=-1, keepdim=True)
        mixed = logits * (1 - confidence)
        for place in range(self.k):
            share = torch.where(rows[:, place] == self.case, self.share, 0.0)[:, None]
            value = self.cases.values[rows[:, place]].double()
            value = (1 - share) * value + share * logits
            mixed = mixed + confidence * weight[:, place, None] * value
        return mixed


def double_loss(model: PreTrainedModel, batch: Batch) -> float:
    """Return the summed loss in fp64: differences would feel fp32's rounding."""
    logits = model(input_ids=batch.ids, attention_mask=batch.real.long(), use_cache=False).logits
    losses = -logits[:, :-1].log_softmax(dim=-1).gather(2, batch.ids[:, 1:, None])[..., 0]
    return float(losses[batch.scored[:, :-1]].sum())


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_score_is_what_the_loss_gains_without_the_case(
    index: int, distinct_memory: RoutingMemory
) -> None:
    """Against differences of the loss itself, in fp64, one layer at a time."""
    model = family("olmoe").double()
    model.set_experts_implementation("eager")
    recall = open_recalls(model, distinct_memory)[index]
    batches = list(distinct_memory.reference_tokens().batches(64))
    scores = score_by_loss(model, [recall], batches)

    def total(case: int, share: float) -> float:
        weakened = Weakened(recall, case, share)
        summed = 0.0
        with torch.no_grad(), install_hooks([RouterHook(recall.cases.router, weakened)]):
            for batch in batches:
                weakened.owner = batch.token_owner
                summed += double_loss(model, batch)
        return summed

    step = 1e-3  # OLMoE's softmax is in fp32: a smaller step would show its rounding
    for case in (int(scores.argmax()), int(scores.argmin()), 7, 100):
        slope = (total(case, step) - total(case, -step)) / (2 * step)
        assert float(scores[case]) == pytest.approx(slope, rel=1e-2, abs=1e-3)
    assert scores.abs().max() > 1e-2


def test_a_case_scores_nothing_by_its_own_example(
    olmoe: PreTrainedModel, small_memory: RoutingMemory
) -> None:
    recalls = open_recalls(olmoe, small_memory)
    reference = small_memory.reference_tokens()
    scores = score_by_loss(olmoe, recalls, list(reference.batches(64, [3])))
    own = recalls[0].cases.owner == reference.owners[3]
    assert (scores[own] == 0).all()
    assert (scores[~own] != 0).any()


def test_keeping_all_is_the_same_memory(
    olmoe: PreTrainedModel, small_memory: RoutingMemory
) -> None:
    kept = prune(olmoe, small_memory, 1.0)
    assert same_cases(kept, small_memory)
    assert kept.manifest == small_memory.manifest


@pytest.mark.parametrize("by", ["loss", "chance"])
def test_what_is_kept_is_as_it_was(
    olmoe: PreTrainedModel, small_memory: RoutingMemory, tmp_path: Path, by: str
) -> None:
    model = olmoe if by == "loss" else None
    small = prune(model, small_memory, 0.25, by=by, folder=tmp_path / "small")  # type: ignore[arg-type]
    assert len(small) == round(0.25 * len(small_memory))
    rows = torch.searchsorted(small_memory.provenance.key, small.provenance.key)
    for index, layer in small.full_layers().items():
        before = small_memory.full_layers()[index]
        assert torch.equal(layer.keys, before.keys[rows])
        assert torch.equal(layer.values, before.values[rows])
        assert layer.gamma == before.gamma
    assert torch.equal(small.provenance.stream, small_memory.provenance.stream)
    assert small.routing == small_memory.routing
    rounds = 2 if by == "loss" else 1
    facts = {"cases": len(small_memory), "kept": len(small), "score": by, "rounds": rounds}
    assert RoutingMemory.from_pretrained(tmp_path / "small").manifest.pruned == facts
    assert same_cases(small, prune(model, small_memory, 0.25, by=by))  # type: ignore[arg-type]
    if by == "chance":
        assert 0.3 < float((rows < len(small_memory) / 2).float().mean()) < 0.7


@pytest.mark.slow
def test_a_pruned_memory_helps_more_than_a_random_part(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, small_memory: RoutingMemory
) -> None:
    unseen = sayings(60)[24:]
    generator = torch.Generator().manual_seed(0)
    count = len(small_memory)
    parts = [torch.randperm(count, generator=generator)[: count // 4] for _ in range(5)]
    memories = [prune(olmoe, small_memory, 0.25)]
    memories += [small_memory.subset(rows.sort().values) for rows in parts]
    losses = []
    for each in memories:
        with attach(olmoe, each):
            losses.append(mean_loss(olmoe, zoo_tokenizer, unseen))
    assert losses[0] < sum(losses[1:]) / 5 < mean_loss(olmoe, zoo_tokenizer, unseen)


@pytest.mark.parametrize("by", ["loss", "chance"])
def test_exact_repeats_go_first(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, by: str
) -> None:
    start = "3 14 15 92 65 35 89 79"
    texts = [f"{start} {text}" for text in make_texts(12, shortest=8, longest=8)]
    built = build_memory(olmoe, zoo_tokenizer, texts, BUILD)
    case = built.provenance.prefix_hash()
    distinct = len(case.unique())
    assert distinct <= 8 + 12 * 8 < len(built)
    small = prune(olmoe if by == "loss" else None, built, distinct / len(built), by=by)  # type: ignore[arg-type]
    assert torch.equal(small.provenance.prefix_hash().sort().values, case.unique())


def test_of_repeats_the_best_stays() -> None:
    scores = torch.tensor([1.0, 5.0, 3.0, -2.0, 4.0])
    case = torch.tensor([7, 8, 8, 9, 8])
    assert best_rows(scores, case, 3).tolist() == [0, 1, 3]
    assert best_rows(scores, case, 4).tolist() == [0, 1, 3, 4]
    assert best_rows(scores, case, 1).tolist() == [1]


def test_steps_are_of_about_a_half() -> None:
    assert _halving_sizes(1000, 600) == [600]
    assert _halving_sizes(1000, 250) == [500, 250]
    assert _halving_sizes(1000, 100) == [464, 215, 100]


def test_the_model_is_left_as_it_was(olmoe: PreTrainedModel, small_memory: RoutingMemory) -> None:
    with torch.inference_mode():
        prune(olmoe, small_memory, 0.5)
    assert not any(router.scope._forward_pre_hooks for router in find_routers(olmoe))
    assert all(parameter.grad is None for parameter in olmoe.parameters())
    assert all(parameter.requires_grad for parameter in olmoe.parameters())


@pytest.mark.parametrize("similarity", ["rbf-unit", "cosine"])
def test_every_similarity(
    olmoe: PreTrainedModel, small_memory: RoutingMemory, similarity: str
) -> None:
    manifest = replace(small_memory.manifest, routing=RoutingConfig(k=3, similarity=similarity))
    memory = replace(small_memory, manifest=manifest)
    assert len(prune(olmoe, memory, 0.5)) == len(memory) // 2


@pytest.mark.parametrize("keep", [0, 1.5, float("nan")])
def test_a_share_out_of_range(small_memory: RoutingMemory, keep: float) -> None:
    with pytest.raises(ConfigError, match="keep must be above 0"):
        prune(None, small_memory, keep)


def test_what_cannot_be_pruned(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    small_memory: RoutingMemory,
    tmp_path: Path,
) -> None:
    with attach(olmoe, small_memory), pytest.raises(AttachError, match="memory attached"):
        prune(olmoe, small_memory)
    one = build_memory(olmoe, zoo_tokenizer, sayings(1), BUILD)
    with pytest.raises(PruningError, match="one example only"):
        prune(olmoe, one)
    off = replace(small_memory.manifest, routing=RoutingConfig(confidence_factor=0.0))
    with pytest.raises(PruningError, match="is turned off"):
        prune(olmoe, replace(small_memory, manifest=off))
    random = replace(small_memory.manifest, random_seed=0)
    with pytest.raises(PruningError, match="recalls cases at random"):
        prune(olmoe, replace(small_memory, manifest=random))
    with pytest.raises(MemoryMismatchError, match="was built for"):
        prune(family("gpt_oss"), small_memory)
    with pytest.raises(ConfigError, match="needs the model"):
        prune(None, small_memory)
    with pytest.raises(ConfigError, match="one of loss, chance, got 'size'"):
        prune(None, small_memory, by="size")  # type: ignore[arg-type]
    compressed = compress(small_memory, "fast", tmp_path / "small")
    with pytest.raises(MemoryFormatError, match="has no keys"):
        prune(olmoe, compressed)
    with pytest.raises(MemoryFormatError, match="exists already"):
        prune(None, small_memory, by="chance", folder=tmp_path / "small")


@pytest.mark.slow
def test_a_memory_pruned_by_chance_is_calibrated_on_its_own_examples(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    built = build_memory(olmoe, zoo_tokenizer, sayings(60), replace(BUILD, learning_rate=20.0))
    small = prune(None, built, 0.5, by="chance")
    quick = replace(QUICK, steps=4, value_rates=())
    found = calibrate(olmoe, small, config=quick)
    assert found.judgement.tokens == calibrate(olmoe, built, config=quick).judgement.tokens
    assert len(found.apply(small)) == len(small)


@pytest.mark.slow
def test_a_memory_pruned_by_loss_is_not_judged_by_its_own_examples(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, small_memory: RoutingMemory
) -> None:
    by_loss = prune(olmoe, small_memory, 0.5)
    by_both = prune(None, by_loss, 0.5, by="chance")
    assert by_both.manifest.pruned is not None
    assert by_both.manifest.pruned["score"] == "loss and chance"
    assert by_both.manifest.pruned["cases"] == len(small_memory)
    merged = prune(None, small_memory, 0.5, by="chance").merge(by_loss)
    for refused in (by_loss, by_both, merged):
        with pytest.raises(CalibrationError, match="pruned by what its own examples"):
            calibrate(olmoe, refused)
    others = [text for text in sayings(90)[24:] if text not in sayings(24)]
    quick = replace(QUICK, steps=4, value_rates=())
    calibrate(olmoe, by_loss, others, quick, tokenizer=zoo_tokenizer)


def test_a_dropped_token_of_a_completion_is_still_scored(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in make_texts(30)]
    examples = [Example(prompt, completion) for prompt, completion in texts]
    config = replace(BUILD, tokens="completion", max_length=7)
    built = build_memory(olmoe, zoo_tokenizer, examples, config)
    scored = built.reference_tokens().scored
    assert torch.equal(scored, reference_tokens(olmoe, zoo_tokenizer, examples, config).scored)
    small = prune(None, built, 0.5, by="chance")
    left = small.reference_tokens().scored
    assert not (left & ~scored).any()
    assert len(small) < 0.8 * int(left.sum())
    assert left[small.provenance.key].all()


def test_the_prune_command(
    olmoe_folder: Path, small_folder: Path, small_memory: RoutingMemory
) -> None:
    small, other = small_folder.with_name("s"), small_folder.with_name("t")
    done = run_cli("prune", olmoe_folder, small_folder, "--keep", 0.25, "-o", small, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cases"] == round(0.25 * len(small_memory))
    assert "by loss" in run_cli("inspect", small).stdout
    by_chance = run_cli("prune", small_folder, "--keep", 0.5, "--by", "chance")
    assert by_chance.exit_code == 0, by_chance.output
    written = RoutingMemory.from_pretrained(f"{small_folder}-pruned")
    assert same_cases(written, prune(None, small_memory, 0.5, by="chance"))
    for arguments, message in (
        ((small_folder, "--by", "chance", "--keep", 2, "-o", other), "keep must be"),
        ((small_folder, "--by", "chance"), "exists already"),
        ((small_folder, "-o", other), "Pruning by loss needs the model"),
        ((olmoe_folder, small_folder, "--by", "chance", "-o", other), "uses no model"),
        ((olmoe_folder, small_folder, small_folder, "-o", other), "a model and a memory"),
    ):
        refused = run_cli("prune", *arguments)
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.split())
    assert not other.exists()
