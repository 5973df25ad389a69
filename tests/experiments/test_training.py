"""The scripts in models/: how they train, and what they say about a model."""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, OlmoeForCausalLM

import measure
import train
from audit import audit_experts, divergence, expert_use, held_out, losses_by_domain
from corpus import SEEN, UNSEEN, encode, read_texts, train_tokenizer
from helpers.small_corpus import RECIPE, write_corpus
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model
from train import MasterAdamW, Recipe, Run, learning_rate, load_imbalance, make_model

RECIPES = sorted((Path(train.__file__).parent / "recipes").glob("*.json"))
STEPS = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Any:
    texts = [text for domain in SEEN for text in read_texts(data, domain, "train")]
    return train_tokenizer(texts, RECIPE.config["vocab_size"])


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A training that has ended."""
    run = Run(data, tmp_path_factory.mktemp("out"), "cpu", compiled=False, max_steps=STEPS)
    train.prepare_tokenizer(run, RECIPE)
    train.train(RECIPE, run)
    return run


@pytest.fixture(scope="module")
def trained(run: Run) -> Any:
    return AutoModelForCausalLM.from_pretrained(run.out / RECIPE.name, dtype=torch.float32).eval()


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return found


# Training.


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_even_use_has_an_imbalance_of_one(top_k: int) -> None:
    wheel = torch.tensor([5.0, 4, 3, 2, 1, 0, 0, 0])  # each expert has each place in turn
    logits = torch.stack([wheel.roll(turn) for turn in range(8)]).repeat(2, 3, 1)
    assert float(load_imbalance(logits, top_k)) == pytest.approx(1)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (8, 2), (16, 4), (4, 4)])
def test_one_choice_for_all_has_the_worst_imbalance(experts: int, top_k: int) -> None:
    logits = torch.zeros(2, 10, experts)
    logits[..., :top_k] = 50.0
    assert float(load_imbalance(logits, top_k)) == pytest.approx(experts / top_k)


@given(st.integers(0, 1000), st.integers(1, 6))
def test_load_imbalance_written_out(seed: int, top_k: int) -> None:
    layers, tokens, experts = 3, 7, 6
    logits = torch.randn(
        layers, tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    total = 0.0
    for layer in logits.tolist():
        for expert in range(experts):
            fraction = probability = 0.0
            for token in layer:
                weights = [math.exp(logit) for logit in token]
                probability += weights[expert] / sum(weights) / tokens
                ranked = sorted(range(experts), key=lambda e, token=token: -token[e])
                fraction += (expert in ranked[:top_k]) / top_k / tokens
            total += experts * fraction * probability / layers
    assert float(load_imbalance(logits, top_k)) == pytest.approx(total, rel=1e-5)
    assert 0 < total <= experts / top_k + 1e-9


def test_balance_is_differentiable_and_pulls_towards_even_use() -> None:
    logits = torch.randn(2, 40, 8) + torch.linspace(0, 2, 8)
    before = float(load_imbalance(logits, 2))
    for _ in range(20):
        logits.requires_grad_()
        (slope,) = torch.autograd.grad(load_imbalance(logits, 2), logits)
        logits = logits.detach() - 20 * slope
    assert float(load_imbalance(logits, 2)) < before


def test_the_learning_rate_rises_then_falls_to_a_twentieth() -> None:
    recipe = replace(RECIPE, learning_rate=2.0, warmup=0.25)
    assert [learning_rate(share, recipe) for share in (0, 0.125, 0.25)] == [0, 1, 2]
    assert learning_rate(0.625, recipe) == pytest.approx(2 * (0.05 + 0.95 / 2))  # halfway down
    assert learning_rate(1.0, recipe) == pytest.approx(0.1)
    falling = [learning_rate(0.25 + step / 100, recipe) for step in range(75)]
    assert falling == sorted(falling, reverse=True)


def small_network(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(dtype)


def reference_optimiser(network: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in network.parameters() if p.ndim == 2]
    vectors = [p for p in network.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


@pytest.mark.parametrize("clip", [0.05, 100.0], ids=["clipped", "not clipped"])
def test_the_optimiser_is_adamw(clip: float) -> None:
    recipe = replace(RECIPE, weight_decay=0.3, clip=clip)
    ours = small_network(torch.float32)
    theirs = copy.deepcopy(ours)
    start = copy.deepcopy(ours.state_dict())
    optimiser, reference = MasterAdamW(ours, recipe), reference_optimiser(theirs, recipe)
    for step in range(5):
        batch = torch.randn(16, 6)
        ours(batch).square().mean().backward()
        optimiser.step(0.01 * (step + 1))
        theirs(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        reference.step()
        reference.zero_grad()
        assert all(parameter.grad is None for parameter in ours.parameters())
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
        assert not torch.equal(start[name], weight), name


def test_bf16_weights_are_rounded_from_fp32_ones() -> None:
    """As a plain AdamW in fp32, given the same gradients."""
    ours = small_network(torch.bfloat16)
    theirs = copy.deepcopy(ours).float()
    optimiser, reference = MasterAdamW(ours, RECIPE), reference_optimiser(theirs, RECIPE)
    for _ in range(5):
        ours(torch.randn(16, 6, dtype=torch.bfloat16)).float().square().mean().backward()
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            two.grad = one.grad.float()
        optimiser.step(0.01)
        nn.utils.clip_grad_norm_(theirs.parameters(), RECIPE.clip)
        for group in reference.param_groups:
            group["lr"] = 0.01
        reference.step()
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, two.bfloat16())


def test_small_steps_are_not_lost_in_rounding() -> None:
    network = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(network.weight)
    plain = copy.deepcopy(network)
    optimiser = MasterAdamW(network, replace(RECIPE, weight_decay=0.0))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        for each in (network, plain):
            each.weight.grad = torch.ones_like(each.weight)
        optimiser.step(1e-4)
        theirs.step()
    assert plain.weight.item() == 1  # each step is less than half of bf16's
    assert network.weight.item() == pytest.approx(0.98, abs=0.004)


def test_training_lowers_the_loss(run: Run, data: Path) -> None:
    found = facts(run.out / RECIPE.name)
    assert found["history"]["valid"][-1] < 0.75 * math.log(RECIPE.config["vocab_size"])
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer)
    untrained = losses_by_domain(make_model(RECIPE, tokenizer), held_out(tokenizer, data, SEEN))
    assert all(found["losses"][domain] < untrained[domain] - 1 for domain in SEEN)


def test_a_trained_model_is_a_folder_like_any_other(run: Run, trained: Any, data: Path) -> None:
    folder = run.out / RECIPE.name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(trained) is OlmoeForCausalLM
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert trained.config.to_dict().items() >= RECIPE.config.items()
    assert trained.config.router_aux_loss_coef == RECIPE.balance
    assert (trained.config.eos_token_id, trained.config.pad_token_id) == (0, 1)
    found = facts(folder)
    assert found["recipe"] == "least"
    assert found["domains"] == list(SEEN)
    assert found["parameters"] == sum(parameter.numel() for parameter in trained.parameters())
    documents = [
        text for domain in SEEN for text in encode(tokenizer, read_texts(data, domain, "train"))
    ]
    assert found["train_tokens"] == sum(map(len, documents))
    assert found["history"]["tokens"] == STEPS * RECIPE.batch * RECIPE.length
    assert found["versions"] == {"torch": torch.__version__, "device": "CPU"}
    tokens = held_out(tokenizer, data, (*SEEN, *UNSEEN))
    assert losses_by_domain(trained, tokens) == pytest.approx(found["losses"], abs=0.05)
    assert found["experts"].keys() == {"load", "busiest", "idlest", "divergence"}


def test_active_parameters_leave_out_the_experts_not_chosen(trained: Any) -> None:
    one_expert = 3 * RECIPE.config["hidden_size"] * RECIPE.config["intermediate_size"]
    idle = 2 * 2 * one_expert  # two of four experts, in each of two layers
    total = sum(parameter.numel() for parameter in trained.parameters())
    assert train.active_parameters(trained) == total - idle


def test_the_command_trains_the_same_model_again(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "least.json"
    words = ("model_type", "config", "epochs", "length", "batch", "learning_rate")
    recipe.write_text(json.dumps({word: getattr(RECIPE, word) for word in words}))
    assert Recipe.read(recipe) == RECIPE
    out = tmp_path / "out"
    options = ("--data", data, "--device", "cpu", "--eager", "--max-steps", STEPS)
    monkeypatch.setattr(sys, "argv", list(map(str, ["train.py", recipe, "--out", out, *options])))
    train.main()
    first, second = facts(run.out / "least"), facts(out / "least")
    for found in (first, second):
        del found["history"]["seconds"]
    assert first == second
    weights = [folder / "least" / "model.safetensors" for folder in (run.out, out)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    tokenizers = [folder / "least" / "tokenizer.json" for folder in (run.out, out)]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def test_another_seed_trains_another_model(run: Run) -> None:
    other = replace(RECIPE, name="other", seed=1)
    train.train(other, replace(run, max_steps=3))
    assert facts(run.out / "other")["losses"] != facts(run.out / RECIPE.name)["losses"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_makes_a_model_of_its_size(path: Path) -> None:
    recipe = Recipe.read(path)
    with torch.device("meta"):
        model = make_model(recipe, AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe")))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    low, high = (0, 8e6) if recipe.name.startswith("tiny-") else (75e6, 90e6)
    assert low < parameters <= high
    assert model.dtype == torch.bfloat16
    if recipe.name in EMBEDDED_MODELS:
        folder = Path(embedded_model(recipe.name))
        assert parameters == facts(folder)["parameters"]
        config = AutoConfig.from_pretrained(folder)
        assert config.model_type == recipe.model_type
        assert {key: getattr(config, key) for key in recipe.config} == recipe.config


def test_there_is_a_recipe_for_every_embedded_model() -> None:
    assert {path.stem for path in RECIPES} == {*EMBEDDED_MODELS, "olmoe-80m"}


# What a model became.


def test_losses_are_the_models_own(trained: Any, tokenizer: Any, data: Path) -> None:
    tokens = held_out(tokenizer, data, ("legal", "gsm8k"))
    for domain, found in losses_by_domain(trained, tokens).items():
        ids = tokens[domain]
        assert ids.shape[1] == 256
        assert len(ids) >= 2
        assert found == pytest.approx(trained(ids, labels=ids).loss.item(), abs=1e-4)


def test_held_out_text_is_the_beginning_of_the_validation_text(tokenizer: Any, data: Path) -> None:
    found = held_out(tokenizer, data, ("sql",))["sql"].flatten().tolist()
    joined = "<|endoftext|>".join(read_texts(data, "sql", "valid"))
    assert joined.startswith(tokenizer.decode(found))


def test_expert_use_is_counted_from_the_router_logits(trained: Any) -> None:
    ids = torch.randint(2, 300, (40, 12))
    logits = trained(ids, output_router_logits=True).router_logits
    hooks = [len(module._forward_hooks) for module in trained.modules()]
    found = expert_use(trained, ids)
    assert [len(module._forward_hooks) for module in trained.modules()] == hooks
    for row, layer in zip(found, logits, strict=True):
        chosen = layer.reshape(-1, 4).topk(2).indices.flatten().tolist()
        expected = [chosen.count(expert) / len(chosen) for expert in range(4)]
        assert row.tolist() == pytest.approx(expected)


def test_an_audit_says_how_even_the_use_is(trained: Any) -> None:
    parts = {"low": torch.randint(2, 100, (4, 16)), "high": torch.randint(200, 300, (4, 16))}
    found = audit_experts(trained, parts)
    uses = {name: expert_use(trained, part) for name, part in parts.items()}
    mean = (uses["low"] + uses["high"]) / 2
    for place, row in enumerate(mean):
        assert found["load"][place] == pytest.approx(row.tolist(), abs=1e-4)
        assert found["busiest"][place] == pytest.approx(4 * float(row.max()), abs=0.01)
        assert found["idlest"][place] == pytest.approx(4 * float(row.min()), abs=0.01)
    apart = found["divergence"]
    assert apart["low"]["high"] == apart["high"]["low"] > 0
    assert apart["low"]["low"] == apart["high"]["high"] == 0


def test_divergence_is_from_none_to_one_bit() -> None:
    one = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
    other = torch.tensor([[0.0, 0.0, 0.2, 0.8], [0.1, 0.2, 0.3, 0.4]])
    assert divergence(one, one) == 0
    assert divergence(one[:1], other[:1]) == pytest.approx(1)
    assert divergence(one, other) == pytest.approx(0.5)  # the mean over layers
    half = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    by_hand = (math.log2(4 / 3) + 0.5 * math.log2(2 / 3) + 0.5 * math.log2(2)) / 2
    assert divergence(*half) == pytest.approx(by_hand)


# What a memory is worth.


@pytest.fixture(scope="module")
def measured(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """From the command, with little text."""
    out = tmp_path_factory.mktemp("measurements") / "new"
    sizes = ("--sequences", 2, "--windows", 2, "--sizes", 1, 3)
    options = ("--data", run.data, "--device", "cpu", "--out", out, *sizes)
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["measure.py", run.out / RECIPE.name, *options]
        patch.setattr(sys, "argv", [str(argument) for argument in arguments])
        measure.main()
    assert [path.name for path in out.iterdir()] == ["least.json"]
    found: dict[str, Any] = json.loads((out / "least.json").read_text())
    return found


def test_a_measurement_says_what_was_measured(measured: dict[str, Any]) -> None:
    assert measured.keys() == {"model", "sequences", "device", "table", "growth"}
    assert (measured["model"], measured["sequences"], measured["device"]) == ("least", 2, "CPU")
    assert [(row["domain"], row["way"]) for row in measured["table"]] == [
        (domain, way)
        for domain in ("medical", "sql")
        for way in ("zero-shot", "paper", "strong", "control")
    ]
    assert [(row["sequences"], row["way"]) for row in measured["growth"]] == [
        (1, "paper"),
        (1, "strong"),
        (3, "paper"),
        (3, "strong"),
    ]


def test_changes_are_against_the_model_alone(measured: dict[str, Any]) -> None:
    alone = {row["domain"]: row for row in measured["table"] if row["way"] == "zero-shot"}
    for row in (*measured["table"], *measured["growth"]):
        base = alone[row.get("domain", "medical")]
        if row is base:
            assert row.keys() == {"domain", "way", "nll", "accuracy"}
            continue
        for name in ("nll", "accuracy"):
            change = row[f"{name}_change"]
            assert change.keys() == {"difference", "low", "high", "p"}
            assert change["difference"] == pytest.approx(row[name] - base[name], abs=2e-4)
            assert change["low"] <= change["difference"] <= change["high"]


def test_the_model_alone_has_the_loss_it_had(
    measured: dict[str, Any], trained: Any, tokenizer: Any, data: Path
) -> None:
    tokens = {domain: part[:2] for domain, part in held_out(tokenizer, data, ("sql",)).items()}
    row = next(row for row in measured["table"] if row["domain"] == "sql")
    assert row["nll"] == pytest.approx(losses_by_domain(trained, tokens)["sql"], abs=2e-4)


def test_the_strong_memory_helps_and_the_control_does_not(measured: dict[str, Any]) -> None:
    """Its text is much like the test's."""
    for domain in ("medical", "sql"):
        ways = {row["way"]: row["nll"] for row in measured["table"] if row["domain"] == domain}
        assert ways["strong"] < ways["zero-shot"] - 0.05
        assert ways["strong"] < ways["control"] - 0.05
