"""Fine-tuning as a method: its search for a rate, its facts, and a model left as it was."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import trained
from helpers.tuned import COLOURS, QUICK, quiz_context
from helpers.unchanged import left_as_it_was
from knn_moe import find_routers
from knn_moe.errors import ConfigError, MissingDependencyError, ModelError, ReferenceSetError
from knn_moe.evaluation.evaluate import EvalConfig, evaluate
from knn_moe.methods.sft import prepare_router_sft, prepare_sft, search_rates
from knn_moe.methods.training_loop import TrainingRun, TuneConfig, split_reference
from knn_moe.support.embedded_models import EMBEDDED_MODELS
from knn_moe.support.progress import Progress

BOTH = pytest.mark.parametrize("prepare", [prepare_sft, prepare_router_sft])


@pytest.mark.parametrize(
    ("losses", "tried"),
    [
        ({0.1: 3.0, 0.2: 1.0, 0.4: 2.0}, [0.1, 0.2, 0.4]),
        ({0.1: 3.0, 0.2: 2.0, 0.4: 1.0, 0.8: 2.0}, [0.1, 0.2, 0.4, 0.8]),
        ({0.1: 3.0, 0.2: 2.0, 0.4: 1.0, 0.8: 0.5, 1.6: 0.1}, [0.1, 0.2, 0.4, 0.8, 1.6]),
        ({0.1: 1.0, 0.2: 2.0, 0.4: 3.0, 0.05: math.nan}, [0.1, 0.2, 0.4, 0.05]),
        ({0.1: 1.0}, [0.1]),
    ],
)
def test_the_search_goes_beyond_an_outermost_best_rate(
    losses: dict[float, float], tried: list[float]
) -> None:
    def try_rate(rate: float) -> TrainingRun:
        return TrainingRun(rate, 1, validation=[9.0, losses[rate]], changes={})

    runs = search_rates(tuple(tried[:3]), 2, try_rate)
    assert [run.rate for run in runs] == tried
    best = min((loss, rate) for rate, loss in losses.items() if loss == loss)[1]
    assert [run.rate for run in runs if run.changes is not None] == [best]


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("name", ["tiny-olmoe", "tiny-gpt-oss"])
def test_the_model_is_left_as_it_was(prepare: Any, name: str, tiny_tokenizer: Any) -> None:
    model = trained(name)
    with left_as_it_was(model):
        method = prepare(quiz_context(model, tiny_tokenizer), QUICK)
    with left_as_it_was(model), method.apply_to(model):
        pass
    with left_as_it_was(model), pytest.raises(KeyboardInterrupt), method.apply_to(model):
        raise KeyboardInterrupt


@BOTH
def test_an_interrupted_training_leaves_the_model_as_it_was(
    prepare: Any, tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    """Interrupted in a forward pass, while PEFT has changed the experts' classes."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    handle = tiny_olmoe.model.layers[3].mlp.experts.register_forward_pre_hook(stop)
    try:
        with left_as_it_was(tiny_olmoe), pytest.raises(KeyboardInterrupt):
            prepare(quiz_context(tiny_olmoe, tiny_tokenizer), QUICK)
    finally:
        handle.remove()
    assert not tiny_olmoe.model.layers[3].mlp.experts._forward_pre_hooks


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_router_sft_changes_routers_only(name: str, tiny_tokenizer: Any) -> None:
    model = trained(name)
    method = prepare_router_sft(quiz_context(model, tiny_tokenizer), QUICK)
    kinds = ("weight", "bias") if name == "tiny-gpt-oss" else ("weight",)
    routers = {f"{each.name}.{kind}" for each in find_routers(model) for kind in kinds}
    before = {key: each.clone() for key, each in model.named_parameters()}
    with method.apply_to(model):
        after = dict(model.named_parameters())
        assert {key for key in before if not torch.equal(after[key], before[key])} == routers
    assert method.facts()["trainable_parameters"] == sum(before[key].numel() for key in routers)


@pytest.mark.slow
@BOTH
def test_a_bf16_model_is_tuned(prepare: Any, tiny_tokenizer: Any) -> None:
    model = trained("tiny-olmoe", torch.bfloat16)
    method = prepare(quiz_context(model, tiny_tokenizer), QUICK)
    assert method.facts()["validation_loss"] < method.facts()["untouched_validation_loss"]
    with method.apply_to(model):
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_the_facts_say_what_was_done(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    steps: list[Progress] = []
    config = TuneConfig(learning_rates=(1e-3, 3e-3), rank=4, epochs=2, batch_size=8, extensions=1)
    context = quiz_context(tiny_olmoe, tiny_tokenizer, on_progress=steps.append, seed=3)
    facts = prepare_sft(context, config).facts()
    assert facts["rates_beyond"] == [0.009]
    assert list(facts["validation_losses"]) == ["0.001", "0.003", "0.009"]
    assert all(len(losses) == 2 for losses in facts["validation_losses"].values())
    best = facts["validation_losses"][f"{facts['learning_rate']:g}"]
    assert facts["validation_loss"] == best[facts["best_epoch"] - 1] == min(best)
    assert facts["validation_loss"] < facts["untouched_validation_loss"]
    sizes = {key: facts[key] for key in ("windows", "validation_windows", "rank", "seed")}
    assert sizes == {"windows": 8, "validation_windows": 2, "rank": 4, "seed": 3}
    split = split_reference(context, 0.15, 3)
    assert facts["tokens"] == int(split.tokens.lengths[split.train].sum())
    assert 0 < facts["scored_tokens"] < facts["tokens"] / 2
    assert steps[0] == ("lr 0.001, epoch 1", 1, 4)
    assert steps[-1] == ("lr 0.009, epoch 2", 6, 6)


@pytest.mark.slow
def test_the_same_seed_learns_the_same(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    one, two, other = (
        prepare_router_sft(quiz_context(tiny_olmoe, tiny_tokenizer, seed=seed), QUICK).facts()
        for seed in (0, 0, 1)
    )
    assert one == two
    assert one["validation_loss"] != other["validation_loss"]


@pytest.mark.slow
def test_a_tuned_model_answers(tiny_olmoe: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    context = quiz_context(tiny_olmoe, tiny_tokenizer)
    scoring = EvalConfig(scoring="likelihood", batch_size=4)
    likelihoods = {}
    for method in (prepare_sft(context, QUICK), prepare_router_sft(context, QUICK)):
        folder = tmp_path / method.name
        run = evaluate(tiny_olmoe, tiny_tokenizer, COLOURS, method, scoring, folder=folder)
        likelihoods[method.name] = [sample.likelihoods for sample in run.samples]
    assert likelihoods["sft"] != likelihoods["sft-router"]


def test_without_peft_the_error_names_the_cure(
    tiny_olmoe: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"PEFT: pip install 'knn-moe\[tune\]'"):
        prepare_sft(quiz_context(tiny_olmoe, tiny_tokenizer), QUICK)


def test_a_loss_that_is_not_finite(tiny_tokenizer: Any) -> None:
    model = trained("tiny-olmoe")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(ModelError, match=r"not finite at any learning rate \(0\.01\)"):
        prepare_router_sft(quiz_context(model, tiny_tokenizer), QUICK)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"epochs": 0},
        {"validation": 1.0},
        {"learning_rates": ()},
        {"learning_rates": (1e-3, -1.0)},
    ],
)
def test_values_outside_their_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TuneConfig(**wrong)


def test_one_example_cannot_be_split(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    with pytest.raises(ReferenceSetError, match="there are 1"):
        prepare_sft(quiz_context(tiny_olmoe, tiny_tokenizer, limit=1), QUICK)
