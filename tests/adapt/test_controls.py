"""Controls: what each takes from a memory, what it leaves, and that a true memory beats it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from corpus import cut_windows, encode_documents, sample_texts
from helpers.commands import run_cli
from helpers.large_steps import LARGE_ROUTING, LARGE_STEPS
from helpers.tiny import trained, words
from helpers.zoo import family
from knn_moe import (
    RoutingConfig,
    RoutingMemory,
    attach,
    build_memory,
    control,
    find_routers,
)
from knn_moe.adapt.controls import CONTROLS, shuffle_values
from knn_moe.demo.texts import load_documentation
from knn_moe.errors import ConfigError, MemoryMismatchError
from knn_moe.explain.trace import LayerTrace, trace
from knn_moe.methods import KnnMoe
from knn_moe.recall.layer import RouterCall
from knn_moe.recall.random_cases import draw_cases
from knn_moe.tasks.likelihood import token_losses


def order_of(shuffled: RoutingMemory, memory: RoutingMemory, layer: int) -> list[int]:
    """Which case each value of a layer came from."""
    mine, theirs = shuffled.layers[layer].values, memory.layers[layer].values
    same = (mine[:, None] == theirs[None]).all(dim=-1)
    # Texts may share their beginnings; what follows needs values that tell the cases apart.
    assert (same.sum(dim=1) == 1).all()
    return same.int().argmax(dim=1).tolist()


def distinct(memory: RoutingMemory) -> RoutingMemory:
    """With a value of its own for every case, which says whose it is."""
    layers = {
        index: replace(
            layer, values=torch.arange(layer.values.numel()).view_as(layer.values) + 1000.0 * index
        )
        for index, layer in memory.layers.items()
    }
    return replace(memory, layers=layers)


def first_cases(memory: RoutingMemory, count: int) -> RoutingMemory:
    layers = {
        index: replace(layer, keys=layer.keys[:count], values=layer.values[:count])
        for index, layer in memory.layers.items()
    }
    provenance = replace(memory.provenance, key=memory.provenance.key[:count])
    return replace(memory, layers=layers, provenance=provenance)


def test_one_permutation_of_the_values_and_nothing_else(zoo_memory: RoutingMemory) -> None:
    known = distinct(zoo_memory)
    shuffled = shuffle_values(known)
    orders = [order_of(shuffled, known, index) for index in known.layers]
    assert len(orders) == 2
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(len(known)))
    moved = sum(place != case for place, case in enumerate(orders[0]))
    assert moved > 0.9 * len(known)
    for index, layer in known.layers.items():
        assert shuffled.layers[index].keys is layer.keys
        assert shuffled.layers[index].gamma == layer.gamma
    assert shuffled.provenance is known.provenance
    assert shuffled.manifest is known.manifest


def test_the_memory_it_was_made_from_stays(zoo_memory: RoutingMemory) -> None:
    values = {index: layer.values.clone() for index, layer in zoo_memory.layers.items()}
    shuffled = shuffle_values(zoo_memory)
    for index, layer in zoo_memory.layers.items():
        assert torch.equal(layer.values, values[index])
        assert not torch.equal(shuffled.layers[index].values, values[index])
        assert torch.equal(
            shuffled.layers[index].values.sort(dim=0).values, values[index].sort(dim=0).values
        )


def test_every_order_is_as_likely(zoo_memory: RoutingMemory) -> None:
    known = distinct(first_cases(zoo_memory, 3))
    found = Counter(
        tuple(order_of(shuffle_values(known, seed=seed), known, 0)) for seed in range(600)
    )
    assert len(found) == 6
    assert all(65 <= count <= 135 for count in found.values())  # 100 expected
    assert order_of(shuffle_values(known, seed=7), known, 0) == order_of(
        shuffle_values(known, seed=7), known, 0
    )


def test_opened_attached_and_saved(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor, tmp_path: Path
) -> None:
    zoo_memory.save_pretrained(tmp_path / "memory")
    opened = RoutingMemory.from_pretrained(tmp_path / "memory")  # memory-mapped
    shuffled = shuffle_values(opened)
    assert shuffled.folder is None
    outputs = []
    for one in (None, opened, shuffled):
        if one is None:
            outputs.append(zoo_olmoe(prompt, use_cache=False).logits)
        else:
            with attach(zoo_olmoe, one):
                outputs.append(zoo_olmoe(prompt, use_cache=False).logits)
    base, real, control = outputs
    assert not torch.equal(control, base)
    assert not torch.equal(control, real)
    shuffled.save_pretrained(tmp_path / "control")
    again = RoutingMemory.from_pretrained(tmp_path / "control")
    with attach(zoo_olmoe, again):
        assert torch.equal(zoo_olmoe(prompt, use_cache=False).logits, control)


@dataclass(frozen=True)
class Tried:
    """A trained model, a memory of text it never read, windows [W, L] of more such text."""

    model: PreTrainedModel
    memory: RoutingMemory
    test: torch.Tensor

    def loss(self, memory: RoutingMemory | None) -> float:
        if memory is None:
            return float(token_losses(self.model, self.test, 8).nll.mean())
        with attach(self.model, memory):
            return float(token_losses(self.model, self.test, 8).nll.mean())

    def traced(self, memory: RoutingMemory, config: RoutingConfig | None = None) -> LayerTrace:
        """The first layer on the first window: what it reads is the same with any memory."""
        with attach(self.model, memory, config) as routing:
            return trace(self.model, routing, self.test[:1])[min(memory.layers)]


@pytest.fixture(scope="module")
def tried() -> Tried:
    network, tokenizer, text = trained("tiny-qwen3"), words(), load_documentation()
    reference, test = ([one.completion for one in part] for part in (text.reference, text.test))
    # Python's documentation differs between versions: enough of it that the gain does not.
    examples = sample_texts(tokenizer, reference, 120 * 128)
    config = replace(LARGE_STEPS, steps=2, max_length=128, batch_tokens=2048)
    memory = build_memory(network, tokenizer, examples, config)
    # Few cases deserve less confidence than many.
    cautious = replace(LARGE_ROUTING, confidence_scale=0.4)
    memory = replace(memory, manifest=replace(memory.manifest, routing=cautious))
    tokens = encode_documents(tokenizer, sample_texts(tokenizer, test, 20 * 128))
    return Tried(network, memory, cut_windows(tokens, 128).long())


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONTROLS)
def test_the_memory_beats_every_control(tried: Tried, kind: str) -> None:
    alone, real = tried.loss(None), tried.loss(tried.memory)
    assert real < alone - 0.01, (real, alone)
    assert real < tried.loss(control(tried.memory, kind, tried.model)) - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONTROLS)
def test_a_control_is_as_confident_and_weighs_alike(tried: Tried, kind: str) -> None:
    real = tried.traced(tried.memory)
    other = tried.traced(control(tried.memory, kind, tried.model))
    assert torch.equal(other.confidence, real.confidence)
    assert torch.equal(other.weight, real.weight)
    assert torch.equal(other.squared_distance, real.squared_distance)
    assert torch.equal(other.rows, real.rows) == (kind != "random")


@pytest.mark.slow
def test_random_neighbours_are_drawn_afresh_for_each_token(tried: Tried) -> None:
    drawn = control(tried.memory, "random", tried.model)
    first, again = tried.traced(drawn), tried.traced(drawn)
    assert torch.equal(first.rows, again.rows)
    other = tried.traced(control(tried.memory, "random", tried.model, seed=1))
    assert not torch.equal(first.rows, other.rows)
    real = tried.traced(tried.memory)
    cases, asked = len(tried.memory), first.rows.numel()
    # 16 of some 5,000 for each of 128 tokens: about as often the same as chance has it.
    assert (first.rows == real.rows).sum() < 10
    assert len(first.rows.unique()) == pytest.approx(cases * (1 - math.exp(-asked / cases)), 0.1)
    # No case stands for another: tokens with the same nearest case recall different ones.
    nearest, stands_in = real.rows.flatten().tolist(), first.rows.flatten().tolist()
    assert len(set(zip(nearest, stands_in, strict=True))) > 0.99 * asked
    assert len(set(nearest)) < 0.9 * asked


@pytest.mark.slow
def test_what_is_mixed_are_the_values_of_the_cases_drawn(tried: Tried) -> None:
    drawn = control(tried.memory, "random", tried.model)
    calls: list[RouterCall] = []
    with attach(tried.model, drawn) as routing, routing.observed(calls.append):
        tried.model(tried.test[:1], use_cache=False)
    for call in calls:
        values = tried.memory.full_layers()[call.layer].values
        distance, rows = call.recall.nearest(call.inputs)
        weight = call.recall.weights(distance)
        proposal = (weight[:, :, None] * values[rows]).sum(dim=1)
        mixed, confidence = call.recall(call.inputs, torch.zeros_like(proposal))
        assert torch.equal(confidence, call.confidence)
        torch.testing.assert_close(mixed, confidence[:, None] * proposal)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["fast", "faiss-flat"])
def test_random_neighbours_of_any_index(tried: Tried, index: str) -> None:
    drawn = control(tried.memory, "random", tried.model)
    config = replace(drawn.routing, index=index)
    rows = tried.traced(drawn, config).rows
    real = tried.traced(tried.memory, config).rows
    assert (rows == real).sum() < 10
    assert len(rows.unique()) > 0.9 * rows.numel()  # of many more cases than were drawn


@pytest.mark.slow
def test_own_logits_are_what_a_build_of_no_steps_remembers(tried: Tried) -> None:
    own = control(tried.memory, "own-logits", tried.model)
    texts = tried.memory.provenance
    windows_ = [texts.stream[a:b] for a, b in zip(texts.begin[:-1], texts.begin[1:], strict=True)]
    ids = windows_[0].long()[None]
    wanted: dict[int, torch.Tensor] = {}
    routers = find_routers(tried.model)

    def seen(layer: int) -> Callable[..., None]:
        return lambda module, args, output: wanted.update({layer: output[0]})

    handles = [router.module.register_forward_hook(seen(router.layer)) for router in routers]
    with torch.no_grad():
        tried.model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    for index, layer in own.full_layers().items():
        assert layer.keys is tried.memory.full_layers()[index].keys
        # Keys and these logits come from batches of other shapes: rounding differs.
        logits = wanted[index].reshape(-1, layer.values.shape[1])
        torch.testing.assert_close(layer.values[: ids.shape[1]], logits, rtol=1e-3, atol=1e-3)
        router = next(router for router in routers if router.layer == index)
        plain = layer.keys @ router.weight.detach().T
        torch.testing.assert_close(layer.values, plain, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(layer.values, tried.memory.full_layers()[index].values, atol=0.1)


def test_no_config_undoes_a_control_nor_does_saving_it(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor, tmp_path: Path
) -> None:
    drawn = control(zoo_memory, "random", zoo_olmoe)
    drawn.save_pretrained(tmp_path / "control")
    again = RoutingMemory.from_pretrained(tmp_path / "control")
    assert KnnMoe(again).facts() != KnnMoe(zoo_memory).facts()
    assert "at random, seed 0" in (tmp_path / "control" / "README.md").read_text(encoding="utf8")
    assert "at random, seed 0" in run_cli("inspect", tmp_path / "control").stdout
    outputs = []
    for one in (zoo_memory, drawn, again):
        with attach(zoo_olmoe, one, RoutingConfig(k=3)):
            outputs.append(zoo_olmoe(prompt, use_cache=False).logits)
    assert torch.equal(outputs[1], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_controls_say_no_in_words(zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory) -> None:
    with pytest.raises(ConfigError, match=r"Unknown control 'shufled'. Did you mean 'shuffled'\?"):
        control(zoo_memory, "shufled", zoo_olmoe)
    with pytest.raises(ConfigError, match="needs the model"):
        control(zoo_memory, "own-logits")
    other = family("qwen3_moe")
    with pytest.raises(MemoryMismatchError, match="built for"):
        control(zoo_memory, "own-logits", other)


def test_draws_are_even_and_independent() -> None:
    queries = torch.randn(20_000, 8)
    rows = draw_cases(queries, 3, 10, seed=0)
    counts = torch.stack([row.bincount(minlength=10) for row in rows.T])
    assert ((counts - 2000).abs() < 200).all()  # σ = 42
    pairs = (rows[:, 0] * 10 + rows[:, 1]).bincount(minlength=100)
    assert ((pairs - 200).abs() < 75).all()  # σ = 14
    assert torch.equal(draw_cases(queries[5:9], 3, 10, seed=0), rows[5:9])
    near = draw_cases(queries.nextafter(torch.tensor(9.0)), 3, 10, seed=0)
    assert 0.08 < (near == rows).float().mean() < 0.12  # one bit is enough for another draw
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert len(draw_cases(queries.to(dtype), 2, 10, seed=2**60).unique()) == 10


@pytest.mark.slow
def test_by_command(tried: Tried, tmp_path: Path) -> None:
    tried.memory.save_pretrained(tmp_path / "memory")
    texts = words().batch_decode(tried.test)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "more.jsonl").write_text(lines, encoding="utf8")
    flags = [word for kind in CONTROLS for word in ("--control", kind)]
    common = ["--memory", str(tmp_path / "memory"), "--device", "cpu", "--json"]
    asked = ["eval", "tiny-qwen3", "-t", str(tmp_path / "more.jsonl"), "-o", str(tmp_path / "runs")]
    result = run_cli(*asked, *flags, *common)
    assert result.exit_code == 0, result.output
    runs = {run["method"]: run for run in json.loads(result.stdout)}
    assert list(runs) == ["zero-shot", "knn", *(f"knn-{kind}" for kind in CONTROLS)]
    losses = {}
    for method in runs:
        lines = (tmp_path / "runs" / "more" / method / "samples.jsonl").read_text().splitlines()
        losses[method] = sum(json.loads(line)["nll"] for line in lines) / len(lines)
    assert min(losses, key=losses.__getitem__) == "knn"
    assert [run["method_facts"].get("control") for run in runs.values()] == [None, None, *CONTROLS]

    said = {}
    for kind in (None, *CONTROLS):
        flag = [] if kind is None else ["--control", kind]
        result = run_cli("generate", "tiny-qwen3", texts[0], *common, *flag)
        assert result.exit_code == 0, result.output
        said[kind] = json.loads(result.stdout)["text"]
    assert len(set(said.values())) == 4
    wrong = run_cli(*asked, "--control", "randon", *common)
    assert wrong.exit_code == 2
    assert "Did you mean 'random'?" in wrong.stderr
    bare = ["generate", "tiny-qwen3", "A fever", "--control", "random"]
    assert "--control needs a --memory" in run_cli(*bare).stderr
