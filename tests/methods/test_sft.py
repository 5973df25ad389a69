"""Fine-tuning as a method: its search, what it says, and a model left as it was."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import model, tokenizer, trained  # noqa: F401
from helpers.tuned import (  # noqa: F401
    QUICK,
    left_as_it_was,
    quiz,
    quiz_context,
)
from knn_moe.errors import (
    ConfigError,
    MissingDependencyError,
    ModelError,
    ReferenceSetError,
)
from knn_moe.evaluation.evaluate import EvalConfig, evaluate
from knn_moe.methods import tuning
from knn_moe.methods.sft import Trial, prepare_router_sft, prepare_sft, search_rates
from knn_moe.methods.training_loop import (
    TuneConfig,
    rebuilt,
    split_reference,
)
from knn_moe.support.progress import Progress
from knn_moe.tasks import TaskData

# The search for a learning rate.


def trial(losses: dict[float, float]) -> Any:
    return lambda rate: Trial(rate, [9.0, losses[rate]], 1, {"of": rate})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("losses", "tried"),
    [
        ({0.1: 3.0, 0.2: 1.0, 0.4: 2.0}, [0.1, 0.2, 0.4]),
        ({0.1: 3.0, 0.2: 2.0, 0.4: 1.0, 0.8: 2.0}, [0.1, 0.2, 0.4, 0.8]),
        ({0.1: 3.0, 0.2: 2.0, 0.4: 1.0, 0.8: 0.5, 1.6: 0.1}, [0.1, 0.2, 0.4, 0.8, 1.6]),
        ({0.1: 1.0, 0.2: 2.0, 0.4: 3.0, 0.05: math.nan}, [0.1, 0.2, 0.4, 0.05]),
    ],
)
def test_an_outermost_best_rate_is_gone_beyond(losses: dict[float, float], tried: Any) -> None:
    trials = search_rates((0.1, 0.2, 0.4), 2, trial(losses))
    assert [each.rate for each in trials] == tried
    best = min((loss, rate) for rate, loss in losses.items() if loss == loss)[1]
    assert [each.rate for each in trials if each.changes is not None] == [best]


def test_one_rate_is_one_rate() -> None:
    assert len(search_rates((0.1,), 2, trial({0.1: 1.0}))) == 1


# The methods.


@pytest.mark.parametrize("trainer", ["trl", "plain"])
@pytest.mark.parametrize("prepare", [prepare_sft, prepare_router_sft])
def test_a_method_leaves_the_model_as_it_was(
    prepare: Any, trainer: str, model: Any, tokenizer: Any, quiz: TaskData
) -> None:
    config = TuneConfig(learning_rates=(1e-3,), rank=4, epochs=1, batch_size=8, trainer=trainer)
    with left_as_it_was(model):
        words = tokenizer.pad_token, dict(vars(tokenizer)).keys()
        method = prepare(quiz_context(model, tokenizer, quiz), config)
        assert (tokenizer.pad_token, dict(vars(tokenizer)).keys()) == words
    with left_as_it_was(model), method.apply_to(model):
        pass
    with left_as_it_was(model), pytest.raises(KeyboardInterrupt), method.apply_to(model):
        raise KeyboardInterrupt


@pytest.mark.parametrize("prepare", [prepare_sft, prepare_router_sft])
def test_an_interrupted_training_leaves_the_model_as_it_was(
    prepare: Any, model: Any, tokenizer: Any, quiz: TaskData
) -> None:
    """In the midst of a forward pass, when PEFT has the experts' classes changed."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[3].mlp.experts.register_forward_pre_hook(stop)
    context = quiz_context(model, tokenizer, quiz)
    split_reference(context, 0.2, 0)
    try:
        with left_as_it_was(model), pytest.raises(KeyboardInterrupt):
            prepare(context, QUICK)
    finally:
        handle.remove()
    assert not model.model.layers[3].mlp.experts._forward_pre_hooks


def test_hooks_of_before_can_still_be_taken_off(model: Any) -> None:
    handle = model.lm_head.register_forward_hook(lambda *args: None)
    with rebuilt(model):
        model.lm_head.register_forward_hook(lambda *args: None)
    assert len(model.lm_head._forward_hooks) == 1
    handle.remove()
    assert not model.lm_head._forward_hooks


def test_a_method_says_what_it_did(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    steps: list[Progress] = []
    config = TuneConfig(
        learning_rates=(1e-3, 3e-3), rank=4, epochs=2, batch_size=8, trainer="plain", extensions=1
    )
    context = quiz_context(model, tokenizer, quiz, on_progress=steps.append, seed=3)
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
    assert facts["tokens"] == sum(len(window.ids) for window in split.train)
    assert facts["scored_tokens"] < facts["tokens"] / 2
    assert steps[0] == ("lr 0.001, epoch 1", 1, 4)
    assert steps[-1] == ("lr 0.009, epoch 2", 6, 6)


def test_the_same_seed_learns_the_same(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    context = quiz_context(model, tokenizer, quiz)
    one, two = (prepare_sft(context, QUICK).facts() for _ in range(2))
    assert one == two
    other = prepare_sft(quiz_context(model, tokenizer, quiz, seed=1), QUICK).facts()
    assert one["validation_loss"] != other["validation_loss"]


def test_a_tuned_model_answers(model: Any, tokenizer: Any, quiz: TaskData, tmp_path: Path) -> None:
    context = quiz_context(model, tokenizer, quiz)
    scoring = EvalConfig(scoring="likelihood", batch_size=4)
    samples = {}
    for method in (prepare_sft(context, QUICK), prepare_router_sft(context, QUICK)):
        run = evaluate(model, tokenizer, quiz, method, scoring, folder=tmp_path / method.name)
        samples[method.name] = [sample.likelihoods for sample in run.samples]
    assert set(samples) == {"sft", "sft-router"}
    assert samples["sft"] != samples["sft-router"]


# What can go wrong.


def test_missing_parts_name_their_cure(
    model: Any, tokenizer: Any, quiz: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(tuning, "find_spec", lambda name: None if name == "trl" else found(name))
    context = quiz_context(model, tokenizer, quiz)
    with pytest.raises(MissingDependencyError, match=r"pip install 'knn-moe\[tune\]'"):
        prepare_router_sft(context, TuneConfig(trainer="trl"))
    config = TuneConfig(learning_rates=(1e-2,), epochs=1)
    assert prepare_router_sft(context, config).facts()["trainer"] == "plain"
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingDependencyError, match="PEFT"):
        prepare_sft(context, QUICK)


def test_a_loss_that_is_no_number_is_told(tokenizer: Any, quiz: TaskData) -> None:
    model = trained("tiny-olmoe")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(ModelError, match=r"No learning rate of 0\.01 gives a loss"):
        prepare_router_sft(quiz_context(model, tokenizer, quiz), QUICK)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"epochs": 0},
        {"validation": 1.0},
        {"learning_rates": ()},
        {"learning_rates": (1e-3, -1.0)},
        {"trainer": "keras"},
    ],
)
def test_settings_outside_their_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TuneConfig(**wrong)


def test_nothing_to_split(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    context = quiz_context(model, tokenizer, quiz, limit=1)
    with pytest.raises(ReferenceSetError, match="there are 1"):
        prepare_sft(context, QUICK)
