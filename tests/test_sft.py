"""Fine-tuning: what is trained and on what, the two trainers, and a model left as it was."""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from families import FAMILIES
from knn_moe import Example, find_routers
from knn_moe.embedded import EMBEDDED_MODELS, embedded_model
from knn_moe.errors import (
    ConfigError,
    MissingDependencyError,
    ModelError,
    ReferenceSetError,
    UnsupportedModelError,
)
from knn_moe.evaluation.run import EvalConfig, evaluate
from knn_moe.methods import sft, tuning
from knn_moe.methods.setting import Setting
from knn_moe.methods.sft import Trial, prepare_router_sft, prepare_sft, router_weights, search_rates
from knn_moe.methods.training_loop import (
    IGNORED,
    Course,
    MasterAdamW,
    TuneConfig,
    balance_weight,
    collate,
    rebuilt,
    reference_windows,
    split_reference,
    train_plainly,
    training_loss,
    validation_loss,
)
from knn_moe.methods.tuning import adapters, linear_maps, train_with_trl
from knn_moe.reference import tokenise
from knn_moe.tasks import Choice, Task, TaskData, Text

ONE_RATE = TuneConfig(learning_rates=(1e-3,), rank=4, epochs=2, batch_size=4)
QUICK = TuneConfig(learning_rates=(1e-2,), rank=4, epochs=1, batch_size=4, trainer="plain")


def load(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(embedded_model(name), dtype=dtype)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load("tiny-olmoe")


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    colours = ("red as rust", "blue", "green like old grass")
    return [
        {
            "id": str(number),
            "question": f"What colour is thing number {number}{' again' * (number % 4)}?",
            "choices": list(colours),
            "answer": number % 3,
        }
        for number in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def quiz() -> TaskData:
    task = Task(name="quiz", title="Quiz", kind=Choice(), files="quiz")
    return TaskData(task, rows(6, 100), rows(10), "made up")


@pytest.fixture(scope="module")
def prose() -> TaskData:
    task = Task(name="prose", title="Prose", kind=Text(), files="prose")
    texts = [{"text": f"{number} bottles of beer on the wall. " * number} for number in range(1, 9)]
    return TaskData(task, texts[:2], texts, "made up")


def quiz_setting(model: Any, tokenizer: Any, quiz: TaskData, **more: Any) -> Setting:
    return Setting(model, tokenizer, quiz, "likelihood", **more)


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """All that a method must leave as it was."""
    return {
        "weights": {name: (each.data_ptr(), each.clone()) for name, each in whole(model).items()},
        "gradients": {name: each.grad for name, each in model.named_parameters()},
        "trainable": {name: each.requires_grad for name, each in model.named_parameters()},
        "modules": {
            name: (type(module), module.training, len(module._forward_hooks), sorted(vars(module)))
            for name, module in model.named_modules()
        },
        "configs": (model.config.to_dict(), model.generation_config.to_dict()),
        "experts": model.config._experts_implementation,
    }


def whole(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict(keep_vars=False)


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, (place, weight) in before.pop("weights").items():
        other_place, other = after["weights"][name]
        assert place == other_place, name
        assert torch.equal(weight, other), name
    del after["weights"]
    assert before == after


@contextmanager
def left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    model.train()  # as a user may have it
    model.model.embed_tokens.weight.requires_grad_(False)
    before = snapshot(model)
    chance = (random.getstate(), str(np.random.get_state()), torch.get_rng_state())
    try:
        yield
        assert_same(before, snapshot(model))
        assert random.getstate() == chance[0]
        assert str(np.random.get_state()) == chance[1]
        assert torch.equal(torch.get_rng_state(), chance[2])
    finally:
        model.eval()
        model.model.embed_tokens.weight.requires_grad_(True)


# What is learned from.


def test_the_loss_counts_on_answers_alone(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    setting = quiz_setting(model, tokenizer, quiz)
    found = reference_windows(setting)
    assert len(found) == len(setting.examples) == 10
    for example, (window,) in zip(setting.examples, found, strict=True):
        tokens = tokenise(example, tokenizer)
        start = tokens.completion_start
        assert window.ids == tokens.ids
        assert window.labels == [IGNORED] * start + tokens.ids[start:]
        assert tokenizer.decode(window.ids[start:]) == example.completion


def test_of_a_conversation_the_last_answer_counts(model: Any, quiz: TaskData) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe"))
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    setting = Setting(model, tokenizer, quiz, "generation")
    example, (window,) = setting.examples[1], reference_windows(setting)[1]
    assert example.messages is not None
    counted = [token for token, label in zip(*window, strict=True) if label != IGNORED]
    answer = str(example.messages[-1]["content"])
    assert tokenizer.decode(counted).strip() == answer


def test_texts_are_cut_into_windows_and_count_whole(
    model: Any, tokenizer: Any, prose: TaskData
) -> None:
    setting = Setting(model, tokenizer, prose, "text", length=16)
    found = reference_windows(setting)
    for row, windows in zip(prose.reference, found, strict=True):
        ids = tokenizer(row["text"])["input_ids"]
        together = [token for window in windows for token in window.ids]
        assert together == ids[: len(together)]
        assert len(ids) - len(together) <= 1  # a single token has nothing to predict
        for window in windows:
            assert len(window.ids) <= 16
            assert window.labels == [IGNORED, *window.ids[1:]]


def test_examples_without_an_answer_are_left_out(model: Any, tokenizer: Any, quiz: Any) -> None:
    setting = quiz_setting(model, tokenizer, quiz)
    setting.examples = [Example("What?", ""), Example("Who?", " Me"), Example("Where?", "")]
    assert len(reference_windows(setting)) == 1
    with pytest.raises(ReferenceSetError, match=r"needs 2 examples with an answer.*there are 1"):
        split_reference(setting, 0.15, 0)


def test_a_text_is_on_one_side_of_the_split(model: Any, tokenizer: Any, prose: TaskData) -> None:
    setting = Setting(model, tokenizer, prose, "text", length=16)
    windows = reference_windows(setting)
    split = split_reference(setting, 0.3, 0)
    assert sum(map(len, windows)) == len(split.train) + len(split.valid)
    sides = [[window in split.valid for window in example] for example in windows]
    assert sum(map(all, sides)) == 2  # of 8
    assert all(all(side) or not any(side) for side in sides)
    assert split == split_reference(setting, 0.3, 0)
    assert split != split_reference(setting, 0.3, 1)


# What is trained.


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_every_linear_map_gets_an_adapter_that_learns(name: str, tokenizer: Any, quiz: Any) -> None:
    """And as plain weights they give what they gave as adapters."""
    model = load(name)
    split = split_reference(quiz_setting(model, tokenizer, quiz), 0.2, 0)
    batch = collate(split.valid)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        alone = model(**inputs).logits
    with adapters(model, QUICK) as trainable:
        course = Course(trainable, split, 1e-2, QUICK, 0, lambda epoch: None)
        train_plainly(course)
        with torch.no_grad():
            adapted = trainable.model(**inputs).logits
    assert course.best is not None
    wanted = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "router"}
    for layer in range(model.config.num_hidden_layers):
        own = {key for key in course.best if f"layers.{layer}." in key}
        router = next(each for each in find_routers(model) if each.layer == layer)
        kinds = {"router" if key == f"{router.name}.weight" else part(key) for key in own}
        assert kinds == wanted
        assert len(own) == 7
    for key, change in course.best.items():
        assert change.left.abs().sum() > 0, key
        weight = model.get_parameter(key)
        assert change.onto(weight).shape == weight.shape
        factors = change.left, change.right
        assert all(4 in factor.shape for factor in factors), key
    assert not any("lm_head" in key or "embed" in key for key in course.best)
    with sft.changed(model, course.best), torch.no_grad():
        merged = model(**inputs).logits
        assert len(find_routers(model)) == model.config.num_hidden_layers
    assert (merged - alone).abs().max() > 0.1
    torch.testing.assert_close(merged, adapted, atol=2e-4, rtol=1e-4)


def part(key: str) -> str:
    return next(piece for piece in reversed(key.split(".")) if piece != "weight")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_linear_maps_are_found_in_any_family(family: Any) -> None:
    """All parameters are linear maps, or are not meant: vectors, embeddings, convolutions."""
    model = family.build()
    if family.name == "dbrx":
        with pytest.raises(UnsupportedModelError, match="no matrices that can be tuned"):
            linear_maps(model)
        return
    targets = linear_maps(model)
    found = {f"{name}.weight" for name in targets.modules} | set(targets.parameters)
    routers = {id(router.weight) for router in find_routers(model)}
    names = {id(each): name for name, each in model.named_parameters()}
    assert {names[each] for each in routers} <= found
    left = {
        name
        for name, each in model.named_parameters()
        if each.ndim > 1 and name not in found and "bias" not in name
    }
    # JetMoe's attention is a mixture as well, with a router that is not among those found.
    others = ("embed", "wte", "lm_head", "conv1d", ".conv.conv", "A_log", "self_attention.experts")
    assert not [name for name in left if not any(other in name for other in others)]


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_routers_alone_are_trained(name: str, tokenizer: Any, quiz: TaskData) -> None:
    model = load(name)
    method = prepare_router_sft(quiz_setting(model, tokenizer, quiz), QUICK)
    kinds = ("weight", "bias") if name == "tiny-gpt-oss" else ("weight",)
    routers = {f"{each.name}.{kind}" for each in find_routers(model) for kind in kinds}
    assert set(method.changes) == routers
    before = {key: each.clone() for key, each in model.named_parameters()}
    with method.on(model):
        differ = {
            key for key, each in model.named_parameters() if not torch.equal(each, before[key])
        }
        assert differ == routers
    assert method.facts()["trainable_parameters"] == sum(before[key].numel() for key in routers)


def test_quantised_experts_are_refused(tokenizer: Any, quiz: TaskData) -> None:
    model = load("tiny-gpt-oss")
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            packed = getattr(experts, name).data.to(torch.float16).view(torch.uint8)
            delattr(experts, name)
            experts.register_buffer(name, packed)
    with pytest.raises(UnsupportedModelError, match=r"dequantize=True"):
        linear_maps(model)


# The loss and the two trainers.


def by_hand(model: Any, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Mean loss of the answers' tokens; the load-balancing loss of what is no padding."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        output = model(**inputs, output_router_logits=True)
    losses = []
    for row, labels in zip(output.logits, batch["labels"], strict=True):
        for place, label in enumerate(labels.tolist()):
            if label != IGNORED:
                losses.append(-row[place - 1].log_softmax(dim=-1)[label].item())
    real = batch["attention_mask"].bool().flatten()
    chosen, likely = [], []
    for logits in output.router_logits:
        mine = logits.reshape(len(real), -1)[real].softmax(dim=-1)
        picked = F.one_hot(mine.topk(model.config.num_experts_per_tok).indices, mine.shape[1])
        chosen.append(picked.float())
        likely.append(mine)
    share = torch.cat(chosen).mean(dim=0)
    balance = (share * torch.cat(likely).mean(dim=0)).sum() * likely[0].shape[1]
    return sum(losses) / len(losses), float(balance)


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_training_loss_is_that_of_the_answers_and_of_balance(
    name: str, tokenizer: Any, quiz: TaskData
) -> None:
    model = load(name)
    windows = split_reference(quiz_setting(model, tokenizer, quiz), 0.2, 0).train
    answers, balance = by_hand(model, collate(windows))
    weight = balance_weight(model)
    assert weight == model.config.router_aux_loss_coef > 0
    loss = training_loss(model, collate(windows)).item()
    assert loss == pytest.approx(answers + weight * balance, abs=1e-5)
    assert validation_loss(model, windows, 3) == pytest.approx(answers, abs=1e-5)


@pytest.mark.parametrize(
    ("opens", "name"),
    [*((adapters, name) for name in EMBEDDED_MODELS), (router_weights, "tiny-gpt-oss")],
)
def test_both_trainers_train_the_same(
    opens: Any,
    name: str,
    tokenizer: Any,
    quiz: TaskData,
    tmp_path: Path,
    monkeypatch: Any,
    capfd: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = load(name)
    capfd.readouterr()
    split = split_reference(quiz_setting(model, tokenizer, quiz), 0.2, 0)
    courses: list[Course] = []
    for train in (lambda course: train_with_trl(course, tokenizer), train_plainly):
        torch.manual_seed(0)
        with opens(model, ONE_RATE) as trainable:
            courses.append(Course(trainable, split, 3e-3, ONE_RATE, 0, lambda epoch: None))
            train(courses[-1])
    trl, plain = courses
    first = collate([split.train[place] for place in plain.order(0)[:4]])
    answers, balance = by_hand(model, first)
    assert len(trl.losses) == len(plain.losses) == plain.steps == 4
    assert trl.losses[0] == pytest.approx(answers + balance_weight(model) * balance, abs=1e-5)
    assert plain.losses == pytest.approx(trl.losses, abs=1e-3)
    assert plain.losses[0] == pytest.approx(trl.losses[0], abs=1e-5)
    assert plain.validation == pytest.approx(trl.validation, abs=1e-3)
    assert plain.validation[-1] < validation_loss(model, split.valid, 4) - 0.1
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_epochs_have_orders_of_their_own(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    split = split_reference(quiz_setting(model, tokenizer, quiz), 0.2, 0)
    course = Course(Any, split, 1e-3, ONE_RATE, 0, print)  # type: ignore[arg-type]
    orders = [course.order(epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert orders[1] == course.order(1)


def test_the_best_epoch_is_kept(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    """Far too high a rate: it gets worse as it goes on, and the first epoch's weights count."""
    split = split_reference(quiz_setting(model, tokenizer, quiz), 0.2, 0)
    config = TuneConfig(epochs=3, batch_size=4)
    with router_weights(model, config) as trainable:
        course = Course(trainable, split, 0.5, config, 0, lambda epoch: None)
        train_plainly(course)
    assert course.best is not None
    assert course.best_loss == min(course.validation)
    assert course.validation[-1] != course.best_loss
    with sft.changed(model, course.best):
        again = validation_loss(model, split.valid, 4)
    assert again == pytest.approx(course.best_loss, abs=1e-6)


def test_the_rate_falls_to_nothing_in_a_line(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    split = split_reference(quiz_setting(model, tokenizer, quiz), 0.2, 0)
    with router_weights(model, ONE_RATE) as trainable:
        optimiser, schedule = Course(trainable, split, 0.4, ONE_RATE, 0, print).optimiser()
        seen = []
        for _ in range(4):
            seen.append(schedule.get_last_lr()[0])
            optimiser.step()
            schedule.step()
    assert seen == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert schedule.get_last_lr() == [0]


def test_small_steps_in_bf16_are_not_lost() -> None:
    weight, exact = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3))
    optimiser = MasterAdamW([weight, exact], lr=1e-4, weight_decay=0.01)
    for _ in range(100):
        weight.grad, exact.grad = torch.ones_like(weight), torch.ones_like(exact)
        optimiser.step()
    assert torch.equal(weight, exact.bfloat16())
    assert weight[0] < 1
    optimiser.zero_grad()
    assert weight.grad is exact.grad is None


@pytest.mark.parametrize("prepare", [prepare_sft, prepare_router_sft])
def test_a_bf16_model_is_tuned(prepare: Any, tokenizer: Any, quiz: TaskData) -> None:
    model = load("tiny-olmoe", torch.bfloat16)
    method = prepare(quiz_setting(model, tokenizer, quiz), QUICK)
    assert method.facts()["validation_loss"] < method.facts()["untouched_validation_loss"]
    with method.on(model):
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


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
        method = prepare(quiz_setting(model, tokenizer, quiz), config)
        assert (tokenizer.pad_token, dict(vars(tokenizer)).keys()) == words
    with left_as_it_was(model), method.on(model):
        pass
    with left_as_it_was(model), pytest.raises(KeyboardInterrupt), method.on(model):
        raise KeyboardInterrupt


@pytest.mark.parametrize("prepare", [prepare_sft, prepare_router_sft])
def test_an_interrupted_training_leaves_the_model_as_it_was(
    prepare: Any, model: Any, tokenizer: Any, quiz: TaskData
) -> None:
    """In the midst of a forward pass, when PEFT has the experts' classes changed."""

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[3].mlp.experts.register_forward_pre_hook(stop)
    setting = quiz_setting(model, tokenizer, quiz)
    split_reference(setting, 0.2, 0)
    try:
        with left_as_it_was(model), pytest.raises(KeyboardInterrupt):
            prepare(setting, QUICK)
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
    steps: list[tuple[int, int, str]] = []
    config = TuneConfig(
        learning_rates=(1e-3, 3e-3), rank=4, epochs=2, batch_size=8, trainer="plain", extensions=1
    )
    setting = quiz_setting(
        model, tokenizer, quiz, on_progress=lambda *step: steps.append(step), seed=3
    )
    facts = prepare_sft(setting, config).facts()
    assert facts["rates_beyond"] == [0.009]
    assert list(facts["validation_losses"]) == ["0.001", "0.003", "0.009"]
    assert all(len(losses) == 2 for losses in facts["validation_losses"].values())
    best = facts["validation_losses"][f"{facts['learning_rate']:g}"]
    assert facts["validation_loss"] == best[facts["best_epoch"] - 1] == min(best)
    assert facts["validation_loss"] < facts["untouched_validation_loss"]
    sizes = {key: facts[key] for key in ("windows", "validation_windows", "rank", "seed")}
    assert sizes == {"windows": 8, "validation_windows": 2, "rank": 4, "seed": 3}
    split = split_reference(setting, 0.15, 3)
    assert facts["tokens"] == sum(len(window.ids) for window in split.train)
    assert facts["scored_tokens"] < facts["tokens"] / 2
    assert steps[0] == (1, 4, "lr 0.001, epoch 1")
    assert steps[-1] == (6, 6, "lr 0.009, epoch 2")


def test_the_same_seed_learns_the_same(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    setting = quiz_setting(model, tokenizer, quiz)
    one, two = (prepare_sft(setting, QUICK).facts() for _ in range(2))
    assert one == two
    other = prepare_sft(quiz_setting(model, tokenizer, quiz, seed=1), QUICK).facts()
    assert one["validation_loss"] != other["validation_loss"]


def test_a_tuned_model_answers(model: Any, tokenizer: Any, quiz: TaskData, tmp_path: Path) -> None:
    setting = quiz_setting(model, tokenizer, quiz)
    scoring = EvalConfig(scoring="likelihood", batch_size=4)
    samples = {}
    for method in (prepare_sft(setting, QUICK), prepare_router_sft(setting, QUICK)):
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
    setting = quiz_setting(model, tokenizer, quiz)
    with pytest.raises(MissingDependencyError, match=r"pip install 'knn-moe\[tune\]'"):
        prepare_router_sft(setting, TuneConfig(trainer="trl"))
    config = TuneConfig(learning_rates=(1e-2,), epochs=1)
    assert prepare_router_sft(setting, config).facts()["trainer"] == "plain"
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingDependencyError, match="PEFT"):
        prepare_sft(setting, QUICK)


def test_a_loss_that_is_no_number_is_told(tokenizer: Any, quiz: TaskData) -> None:
    model = load("tiny-olmoe")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(ModelError, match=r"No learning rate of 0\.01 gives a loss"):
        prepare_router_sft(quiz_setting(model, tokenizer, quiz), QUICK)


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
    setting = quiz_setting(model, tokenizer, quiz, limit=1)
    with pytest.raises(ReferenceSetError, match="there are 1"):
        prepare_sft(setting, QUICK)
