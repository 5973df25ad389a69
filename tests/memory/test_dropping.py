"""A memory that forgets examples, and one that learns more: as if it had been built so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.commands import run_cli
from helpers.memories import same_cases
from helpers.zoo import BUILD, family, make_texts
from knn_moe import RoutingMemory, build_memory, prune
from knn_moe.errors import ConfigError

# Dropping examples


def test_a_memory_without_an_example_is_as_if_it_had_never_read_it(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    texts = make_texts(10)
    config = replace(BUILD, batch_tokens=1)  # a batch each: rounding is the same in both
    built = build_memory(zoo_olmoe, zoo_tokenizer, texts, config)
    rest = built.without([2, 5], folder=tmp_path / "rest")
    never = build_memory(
        zoo_olmoe, zoo_tokenizer, [text for n, text in enumerate(texts) if n not in (2, 5)], config
    )
    for index, layer in rest.full_layers().items():
        assert torch.equal(layer.keys, never.full_layers()[index].keys)
        assert torch.equal(layer.values, never.full_layers()[index].values)
        assert layer.gamma == pytest.approx(never.full_layers()[index].gamma)
    for name in ("stream", "begin", "offset_of_window", "key"):
        assert torch.equal(getattr(rest.provenance, name), getattr(never.provenance, name))
    assert rest.provenance.example.unique().tolist() == [0, 1, 3, 4, 6, 7, 8, 9]
    again = rest.without([3])
    assert 3 not in again.provenance.example


def test_nothing_of_a_dropped_example_is_in_the_files(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Every byte of it: its tokens in a row, and each of its keys."""
    texts = [*make_texts(6), " ".join(str(n) for n in range(20, 40))]
    built = build_memory(zoo_olmoe, zoo_tokenizer, texts, BUILD)
    built.without([6], folder=tmp_path / "rest")
    built.save_pretrained(tmp_path / "whole")
    mine = built.provenance.example == 6
    traces = [built.provenance.token[mine][:6].int().numpy().tobytes()]
    for layer in built.full_layers().values():
        traces += [row.numpy().tobytes() for row in (*layer.keys[mine], *layer.values[mine])]
    written, before = (
        b"".join(path.read_bytes() for path in sorted((tmp_path / name).iterdir()))
        for name in ("rest", "whole")
    )
    assert all(trace in before for trace in traces)
    assert not any(trace in written for trace in traces)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([99], "no example 99: it has 12, numbered 0 to 11"),
        ([-1], "no example -1"),
        ([], "No example to drop"),
        (range(12), "Dropping all 12 examples"),
    ],
)
def test_what_cannot_be_dropped(
    zoo_memory: RoutingMemory, examples: list[int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        zoo_memory.without(examples, folder=tmp_path / "rest")
    assert list(tmp_path.iterdir()) == []


def test_a_twin_must_go_too(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = make_texts(4)
    twice = build_memory(zoo_olmoe, zoo_tokenizer, [*texts, texts[1]], BUILD)
    with pytest.raises(ConfigError, match="Example 4 has the same text"):
        twice.without([1])
    assert twice.without([1, 4]).provenance.num_examples == 3


def test_dropping_from_a_pruned_memory_keeps_its_width(zoo_memory: RoutingMemory) -> None:
    small = prune(None, zoo_memory, 0.5, by="chance")
    rest = small.without([7])
    assert rest.layers[0].gamma == zoo_memory.layers[0].gamma
    assert rest.manifest.pruned == small.manifest.pruned
    assert 7 in small.provenance.example
    assert 7 not in rest.provenance.example
    assert zoo_memory.without([7]).layers[0].gamma != zoo_memory.layers[0].gamma


def test_a_calibration_that_read_them_is_forgotten(zoo_memory: RoutingMemory) -> None:
    manifest = replace(zoo_memory.manifest, calibration={"helps": True})
    rest = replace(zoo_memory, manifest=manifest).without([7])
    assert rest.manifest.calibration is None
    assert rest.routing == zoo_memory.build.routing()


# The commands


def test_the_drop_command(zoo_memory: RoutingMemory, tmp_path: Path) -> None:
    zoo_memory.save_pretrained(tmp_path / "memory")
    drop = ("drop", tmp_path / "memory", "-o", tmp_path / "rest", "--example")
    refused = run_cli(*drop, 99)
    assert refused.exit_code == 2
    assert "no example 99" in " ".join(refused.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]
    done = run_cli(*drop, 0, "--example", 5, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    rest = RoutingMemory.from_pretrained(tmp_path / "rest")
    assert facts["examples"] == rest.provenance.num_examples == 10
    assert facts["cases"] + facts["dropped"] == len(zoo_memory)


@pytest.mark.slow
def test_appending_is_building_both(saved_model: Path, tmp_path: Path) -> None:
    first, more = make_texts(5), make_texts(4, seed=1)
    for name, texts in (("first", first), ("more", more), ("both", first + more)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    options = ("--steps", 2, "--learning-rate", 5, "--batch-tokens", 1)
    for name in ("first", "both"):
        source = tmp_path / f"{name}.jsonl"
        assert run_cli("build", saved_model, source, "-o", tmp_path / name, *options).exit_code == 0
    append = ("build", saved_model, tmp_path / "more.jsonl", "--append", tmp_path / "first")
    done = run_cli(*append, "-o", tmp_path / "grown")
    assert done.exit_code == 0, done.output
    grown, both = (RoutingMemory.from_pretrained(tmp_path / name) for name in ("grown", "both"))
    assert same_cases(grown, both)
    assert grown.build == both.build
    refused = run_cli(*append, "-o", tmp_path / "other", "--steps", 3)
    assert refused.exit_code == 2
    assert "built with steps 2, but 3 was given" in " ".join(refused.stderr.split())
    again = run_cli(*append, "-o", tmp_path / "first", "--overwrite")
    assert again.exit_code == 0, again.output
    assert same_cases(RoutingMemory.from_pretrained(tmp_path / "first"), both)
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {"first", "both", "grown"}


def test_appending_to_another_model_s_memory_is_told_first(
    saved_model: Path, zoo_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    build_memory(
        family("gpt_oss"), zoo_tokenizer, make_texts(3), BUILD, folder=tmp_path / "foreign"
    )
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "4 5 6 7"}) + "\n")
    source = tmp_path / "more.jsonl"
    foreign, grown = tmp_path / "foreign", tmp_path / "grown"
    refused = run_cli("build", saved_model, source, "--append", foreign, "-o", grown)
    assert refused.exit_code == 2
    assert "was built for" in " ".join(refused.stderr.split())
    assert {path.name for path in tmp_path.iterdir()} == {"foreign", "more.jsonl"}
