"""Fine-tuning: what is learned from, what is trained, and two trainers that train the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.families import FAMILIES
from helpers.tiny import model, tokenizer, trained, words  # noqa: F401
from helpers.tuned import (  # noqa: F401
    ONE_RATE,
    QUICK,
    quiz,
    quiz_context,
)
from knn_moe import Example, find_routers
from knn_moe.errors import (
    ReferenceSetError,
    UnsupportedModelError,
)
from knn_moe.methods import sft
from knn_moe.methods.sft import prepare_router_sft, prepare_sft, router_weights
from knn_moe.methods.task_context import TaskContext
from knn_moe.methods.training_loop import (
    IGNORED,
    Course,
    MasterAdamW,
    TuneConfig,
    balance_weight,
    collate,
    reference_windows,
    split_reference,
    train_plainly,
    training_loss,
    validation_loss,
)
from knn_moe.methods.tuning import adapters, linear_maps, train_with_trl
from knn_moe.reference.examples import tokenise
from knn_moe.support.embedded_models import EMBEDDED_MODELS
from knn_moe.tasks import Task, TaskData, Text


@pytest.fixture(scope="module")
def prose() -> TaskData:
    task = Task(name="prose", title="Prose", kind=Text(), files="prose")
    texts = [{"text": f"{number} bottles of beer on the wall. " * number} for number in range(1, 9)]
    return TaskData(task, texts[:2], texts, "made up")


# What is learned from.


def test_the_loss_counts_on_answers_alone(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    context = quiz_context(model, tokenizer, quiz)
    found = reference_windows(context)
    assert len(found) == len(context.examples) == 10
    for example, (window,) in zip(context.examples, found, strict=True):
        tokens = tokenise(example, tokenizer)
        start = tokens.completion_start
        assert window.ids == tokens.ids
        assert window.labels == [IGNORED] * start + tokens.ids[start:]
        assert tokenizer.decode(window.ids[start:]) == example.completion


def test_of_a_conversation_the_last_answer_counts(model: Any, quiz: TaskData) -> None:
    tokenizer = words()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    context = TaskContext(model, tokenizer, quiz, "generation")
    example, (window,) = context.examples[1], reference_windows(context)[1]
    assert example.messages is not None
    counted = [token for token, label in zip(*window, strict=True) if label != IGNORED]
    answer = str(example.messages[-1]["content"])
    assert tokenizer.decode(counted).strip() == answer


def test_texts_are_cut_into_windows_and_count_whole(
    model: Any, tokenizer: Any, prose: TaskData
) -> None:
    context = TaskContext(model, tokenizer, prose, "text", length=16)
    found = reference_windows(context)
    for row, windows in zip(prose.reference, found, strict=True):
        ids = tokenizer(row["text"])["input_ids"]
        together = [token for window in windows for token in window.ids]
        assert together == ids[: len(together)]
        assert len(ids) - len(together) <= 1  # a single token has nothing to predict
        for window in windows:
            assert len(window.ids) <= 16
            assert window.labels == [IGNORED, *window.ids[1:]]


def test_examples_without_an_answer_are_left_out(model: Any, tokenizer: Any, quiz: Any) -> None:
    context = quiz_context(model, tokenizer, quiz)
    context.examples = [Example("What?", ""), Example("Who?", " Me"), Example("Where?", "")]
    assert len(reference_windows(context)) == 1
    with pytest.raises(ReferenceSetError, match=r"needs 2 examples with an answer.*there are 1"):
        split_reference(context, 0.15, 0)


def test_a_text_is_on_one_side_of_the_split(model: Any, tokenizer: Any, prose: TaskData) -> None:
    context = TaskContext(model, tokenizer, prose, "text", length=16)
    windows = reference_windows(context)
    split = split_reference(context, 0.3, 0)
    assert sum(map(len, windows)) == len(split.train) + len(split.valid)
    sides = [[window in split.valid for window in example] for example in windows]
    assert sum(map(all, sides)) == 2  # of 8
    assert all(all(side) or not any(side) for side in sides)
    assert split == split_reference(context, 0.3, 0)
    assert split != split_reference(context, 0.3, 1)


# What is trained.


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_every_linear_map_gets_an_adapter_that_learns(name: str, tokenizer: Any, quiz: Any) -> None:
    """And as plain weights they give what they gave as adapters."""
    model = trained(name)
    split = split_reference(quiz_context(model, tokenizer, quiz), 0.2, 0)
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
    model = trained(name)
    method = prepare_router_sft(quiz_context(model, tokenizer, quiz), QUICK)
    kinds = ("weight", "bias") if name == "tiny-gpt-oss" else ("weight",)
    routers = {f"{each.name}.{kind}" for each in find_routers(model) for kind in kinds}
    assert set(method.changes) == routers
    before = {key: each.clone() for key, each in model.named_parameters()}
    with method.apply_to(model):
        differ = {
            key for key, each in model.named_parameters() if not torch.equal(each, before[key])
        }
        assert differ == routers
    assert method.facts()["trainable_parameters"] == sum(before[key].numel() for key in routers)


def test_quantised_experts_are_refused(tokenizer: Any, quiz: TaskData) -> None:
    model = trained("tiny-gpt-oss")
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
    model = trained(name)
    windows = split_reference(quiz_context(model, tokenizer, quiz), 0.2, 0).train
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
    model = trained(name)
    capfd.readouterr()
    split = split_reference(quiz_context(model, tokenizer, quiz), 0.2, 0)
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
    split = split_reference(quiz_context(model, tokenizer, quiz), 0.2, 0)
    course = Course(Any, split, 1e-3, ONE_RATE, 0, print)  # type: ignore[arg-type]
    orders = [course.order(epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert orders[1] == course.order(1)


def test_the_best_epoch_is_kept(model: Any, tokenizer: Any, quiz: TaskData) -> None:
    """Far too high a rate: it gets worse as it goes on, and the first epoch's weights count."""
    split = split_reference(quiz_context(model, tokenizer, quiz), 0.2, 0)
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
    split = split_reference(quiz_context(model, tokenizer, quiz), 0.2, 0)
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
    model = trained("tiny-olmoe", torch.bfloat16)
    method = prepare(quiz_context(model, tokenizer, quiz), QUICK)
    assert method.facts()["validation_loss"] < method.facts()["untouched_validation_loss"]
    with method.apply_to(model):
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
