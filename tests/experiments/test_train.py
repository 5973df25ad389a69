"""experiments/train.py: the objective, the optimiser, and a model trained from end to end."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, OlmoeForCausalLM

import train
from corpus import SEEN, UNSEEN, encode_documents, load_validation_windows, read_texts
from expert_balance import losses_by_domain
from helpers.small_corpus import RECIPE, STEPS
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model
from train import MasterAdamW, Recipe, TrainingRun, learning_rate, load_imbalance, make_model

RECIPES = sorted(
    path
    for path in (Path(train.__file__).parent / "recipes").glob("*.json")
    if not path.stem.startswith("smol-")  # these are for train_smol_moe.py
)


def read_training(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return found


@pytest.mark.parametrize("top_k", [1, 3])
def test_even_use_has_an_imbalance_of_one(top_k: int) -> None:
    wheel = torch.tensor([5.0, 4, 3, 2, 1, 0, 0, 0])  # each expert has each place in turn
    logits = torch.stack([wheel.roll(turn) for turn in range(8)]).repeat(2, 3, 1)
    assert float(load_imbalance(logits, top_k)) == pytest.approx(1)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (4, 4)])
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
    """The weights are those of a plain AdamW in fp32 that is given the same gradients."""
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


def test_weights_have_rates_of_their_own_and_frozen_ones_stay() -> None:
    network = small_network(torch.float32)
    network[0].requires_grad_(False)
    start = copy.deepcopy(network.state_dict())
    settings = replace(RECIPE, weight_decay=0.0)
    optimiser = MasterAdamW(network, settings, lambda name: 10.0 if name == "3.weight" else 1.0)
    network(torch.randn(16, 6)).square().mean().backward()
    optimiser.step(0.01)
    moved = {name: (w - start[name]).abs().max() for name, w in network.state_dict().items()}
    assert moved["0.weight"] == 0
    assert float(moved["3.weight"]) == pytest.approx(0.1, rel=1e-3)  # Adam's first step
    assert float(moved["3.bias"]) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.slow
def test_training_lowers_the_loss(finished_run: TrainingRun, small_data: Path) -> None:
    found = read_training(finished_run.out / "least")
    assert found["history"]["valid"][-1] < 0.75 * math.log(RECIPE.config["vocab_size"])
    tokenizer = AutoTokenizer.from_pretrained(finished_run.tokenizer)
    untrained = losses_by_domain(
        make_model(RECIPE, tokenizer), load_validation_windows(tokenizer, small_data, SEEN)
    )
    assert all(found["losses"][domain] < untrained[domain] - 1 for domain in SEEN)


def test_a_trained_model_is_a_folder_like_any_other(
    finished_run: TrainingRun, least_model: Any, small_data: Path
) -> None:
    folder = finished_run.out / "least"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(least_model) is OlmoeForCausalLM
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert least_model.config.to_dict().items() >= RECIPE.config.items()
    assert least_model.config.router_aux_loss_coef == RECIPE.balance
    assert (least_model.config.eos_token_id, least_model.config.pad_token_id) == (0, 1)
    found = read_training(folder)
    assert found["recipe"] == "least"
    assert found["domains"] == list(SEEN)
    assert found["parameters"] == sum(parameter.numel() for parameter in least_model.parameters())
    documents = [
        text
        for domain in SEEN
        for text in encode_documents(tokenizer, read_texts(small_data, domain, "train"))
    ]
    assert found["train_tokens"] == sum(map(len, documents))
    assert found["history"]["tokens"] == STEPS * RECIPE.batch * RECIPE.length
    assert found["versions"] == {"torch": torch.__version__, "device": "CPU"}
    tokens = load_validation_windows(tokenizer, small_data, (*SEEN, *UNSEEN))
    assert losses_by_domain(least_model, tokens) == pytest.approx(found["losses"], abs=0.05)
    assert found["experts"].keys() == {"load", "busiest", "idlest", "divergence"}


def test_active_parameters_leave_out_the_experts_not_chosen(least_model: Any) -> None:
    one_expert = 3 * RECIPE.config["hidden_size"] * RECIPE.config["intermediate_size"]
    idle = 2 * 2 * one_expert  # two of four experts, in each of two layers
    total = sum(parameter.numel() for parameter in least_model.parameters())
    assert train.active_parameters(least_model) == total - idle


@pytest.mark.slow
def test_the_command_trains_the_same_model_again(
    finished_run: TrainingRun, small_data: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "least.json"
    words = ("model_type", "config", "epochs", "length", "batch", "learning_rate")
    recipe.write_text(json.dumps({word: getattr(RECIPE, word) for word in words}))
    assert Recipe.read(recipe) == RECIPE
    out = tmp_path / "out"
    options = ("--data", small_data, "--device", "cpu", "--eager", "--max-steps", STEPS)
    train.main([str(part) for part in (recipe, "--out", out, *options)])
    first, second = read_training(finished_run.out / "least"), read_training(out / "least")
    for found in (first, second):
        del found["history"]["seconds"]
    assert first == second
    weights = [folder / "least" / "model.safetensors" for folder in (finished_run.out, out)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    tokenizers = [folder / "least" / "tokenizer.json" for folder in (finished_run.out, out)]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


@pytest.mark.slow
def test_another_seed_trains_another_model(finished_run: TrainingRun) -> None:
    other = replace(RECIPE, name="other", seed=1)
    train.train(other, replace(finished_run, max_steps=3))
    assert (
        read_training(finished_run.out / "other")["losses"]
        != read_training(finished_run.out / "least")["losses"]
    )


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
        assert parameters == read_training(folder)["parameters"]
        config = AutoConfig.from_pretrained(folder)
        assert config.model_type == recipe.model_type
        assert {key: getattr(config, key) for key in recipe.config} == recipe.config


def test_there_is_a_recipe_for_every_embedded_model() -> None:
    assert {path.stem for path in RECIPES} == {*EMBEDDED_MODELS, "olmoe-80m"}
