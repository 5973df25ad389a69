"""A memory thinned by chance: it favours no example, so its own can still calibrate it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from knn_moe.adapt.calibrate.splits import own_reference
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from adapt.test_prune import folder, memory, model, network, said, same_cases  # noqa: F401
from helpers.calibrating import QUICK, sayings
from helpers.commands import knn_moe
from helpers.zoo import BUILD, make_texts
from knn_moe import RoutingMemory, build_memory, calibrate, prune
from knn_moe.build.build import reference_tokens
from knn_moe.errors import CalibrationError, ConfigError
from knn_moe.reference.examples import Example


def test_it_keeps_a_share_of_every_part(memory: RoutingMemory) -> None:
    small = prune(None, memory, 0.25, by="chance")
    assert len(small) == round(0.25 * len(memory))
    assert same_cases(small, prune(None, memory, 0.25, by="chance"))
    order = torch.searchsorted(memory.provenance.key, small.provenance.key)
    assert torch.equal(memory.provenance.key[order], small.provenance.key)
    half = float((order < len(memory) / 2).float().mean())
    assert 0.3 < half < 0.7
    assert small.manifest.pruned == {
        "cases": len(memory),
        "kept": len(small),
        "score": "chance",
        "rounds": 1,
    }
    for index, layer in small.full_layers().items():
        whole = memory.full_layers()[index]
        assert torch.equal(layer.keys, whole.keys[order])
        assert torch.equal(layer.values, whole.values[order])
        assert layer.gamma == whole.gamma


def test_exact_repeats_go_first(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    text = sayings(1)
    twice = build_memory(model, tokenizer, [*text, *text], BUILD)
    small = prune(None, twice, 0.5, by="chance")
    assert len(small.provenance.prefix_hash().unique()) == len(small)


def test_its_own_examples_may_calibrate_it(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    built = build_memory(model, tokenizer, sayings(60), replace(BUILD, learning_rate=20.0))
    small = prune(None, built, 0.5, by="chance")
    found = calibrate(model, small, config=QUICK)
    assert found.judgement.tokens == calibrate(model, built, config=QUICK).judgement.tokens
    used = found.apply(small)
    assert len(used) == len(small)
    taught = replace(used, manifest=replace(used.manifest, learned=True))
    with pytest.raises(CalibrationError, match="fitted to its own examples"):
        calibrate(model, taught, config=QUICK)


def test_of_completions_what_was_dropped_is_scored_still(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in make_texts(30)]
    examples = [Example(prompt, completion) for prompt, completion in texts]
    config = replace(BUILD, tokens="completion", max_length=7)
    built = build_memory(model, tokenizer, examples, config)
    scored = own_reference(built).scored
    assert torch.equal(scored, reference_tokens(model, tokenizer, examples, config).scored)
    small = prune(None, built, 0.5, by="chance")
    left = own_reference(small).scored
    assert not (left & ~scored).any()
    assert len(small) < 0.8 * int(left.sum())
    assert left[small.provenance.key].all()


@pytest.mark.parametrize("chance_first", [True, False])
def test_what_was_also_pruned_by_worth_may_not_be(
    model: PreTrainedModel, memory: RoutingMemory, chance_first: bool
) -> None:
    one, two = ("chance", "values") if chance_first else ("values", "chance")
    small = prune(None, prune(None, memory, 0.5, by=one), 0.5, by=two)
    assert small.manifest.pruned is not None
    assert small.manifest.pruned["score"] == f"{one} and {two}"
    assert small.manifest.pruned["cases"] == len(memory)
    merged = prune(None, memory, 0.5, by=one).merge(prune(None, memory, 0.4, by=two))
    for refused in (small, merged):
        with pytest.raises(CalibrationError, match="pruned by what its own examples"):
            calibrate(model, refused)


def test_ways_that_are_none(memory: RoutingMemory) -> None:
    with pytest.raises(ConfigError, match="takes the model"):
        prune(None, memory, by="loss")
    with pytest.raises(ConfigError, match="one of loss, values, chance, got 'size'"):
        prune(None, memory, by="size")  # type: ignore[arg-type]


def test_the_command(network: Path, folder: Path, memory: RoutingMemory) -> None:
    small = folder.with_name("small")
    done = knn_moe("prune", folder, "--keep", 0.5, "--by", "chance", "-o", small)
    assert done.exit_code == 0, done.output
    assert same_cases(RoutingMemory.from_pretrained(small), prune(None, memory, 0.5, by="chance"))
    assert "by chance" in knn_moe("inspect", small).stdout
    for names, by, message in (
        ((folder,), "loss", "needs the model"),
        ((network, folder), "chance", "uses no model"),
    ):
        refused = knn_moe("prune", *names, "--by", by, "-o", folder.with_name("t"))
        assert refused.exit_code == 2
        assert message in said(refused)
    assert not folder.with_name("t").exists()
