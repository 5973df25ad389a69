"""Fine-tuning: what it learns from, its loss, and a loop that is plain AdamW."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from helpers.tiny import trained, words
from helpers.tuned import COLOURS, TWO_EPOCHS, quiz_context, quiz_split
from knn_moe import Example
from knn_moe.errors import ReferenceSetError
from knn_moe.methods.lora import add_adapters
from knn_moe.methods.sft import apply_changes, unfreeze_routers
from knn_moe.methods.task_context import TaskContext
from knn_moe.methods.training_loop import (
    MasterAdamW,
    TrainingSplit,
    TuneConfig,
    split_reference,
    train,
    training_loss,
    validation_loss,
)
from knn_moe.reference.examples import tokenise
from knn_moe.reference.windows import Batch
from knn_moe.support.embedded_models import EMBEDDED_MODELS
from knn_moe.tasks import Task, TaskData, Text

TEXTS = [{"text": f"{number} bottles of beer on the wall. " * number} for number in range(1, 9)]
PROSE = TaskData(
    Task(name="prose", title="Prose", kind=Text(), files="prose"), TEXTS[:2], TEXTS, "made up"
)


def scored_tokens(split: TrainingSplit, window: int) -> tuple[list[int], list[int]]:
    """The tokens of a window, and those of them that count in the loss."""
    batch = split.batch([window])
    return batch.ids[0].tolist(), batch.ids[0, 1:][batch.scored[0, :-1]].tolist()


def test_the_loss_counts_on_answers_only(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    context = quiz_context(tiny_olmoe, tiny_tokenizer)
    split = split_reference(context, 0.2, 0)
    assert sorted([*split.train, *split.validation]) == list(range(10))
    for window, example in enumerate(context.examples):
        tokens = tokenise(example, tiny_tokenizer)
        ids, scored = scored_tokens(split, window)
        assert ids == tokens.ids
        assert scored == tokens.ids[tokens.completion_start :]
        assert tiny_tokenizer.decode(scored) == example.completion


def test_the_last_answer_of_a_conversation_counts(tiny_olmoe: Any) -> None:
    tokenizer = words()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    context = TaskContext(tiny_olmoe, tokenizer, COLOURS, "generation")
    example = context.examples[1]
    assert example.messages is not None
    _, scored = scored_tokens(split_reference(context, 0.2, 0), 1)
    assert tokenizer.decode(scored).strip() == str(example.messages[-1]["content"])


def test_texts_are_cut_into_windows_on_one_side_of_the_split(
    tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    context = TaskContext(tiny_olmoe, tiny_tokenizer, PROSE, "text", length=16)
    split = split_reference(context, 0.3, 0)
    owners = split.tokens.provenance.example_of_window.tolist()
    train_side, validation_side = (
        {owners[window] for window in part} for part in (split.train, split.validation)
    )
    assert len(validation_side) == 2
    assert not train_side & validation_side
    assert train_side | validation_side == set(range(8))
    for place, row in enumerate(TEXTS):
        own = [window for window in (*split.train, *split.validation) if owners[window] == place]
        read = [scored_tokens(split, window) for window in sorted(own)]
        together = [token for ids, _ in read for token in ids]
        whole = tiny_tokenizer(row["text"])["input_ids"]
        assert together == whole[: len(together)]
        assert len(whole) - len(together) <= 1  # a single token has nothing to predict
        assert all(len(ids) <= 16 and scored == ids[1:] for ids, scored in read)
    again, other = (split_reference(context, 0.3, seed) for seed in (0, 1))
    assert (split.train, split.validation) == (again.train, again.validation)
    assert split.validation != other.validation


def test_examples_without_an_answer_are_left_out(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    context = quiz_context(tiny_olmoe, tiny_tokenizer)
    context.examples = [Example("What?", ""), Example("Who?", " Me"), Example("Where?", "")]
    with pytest.raises(ReferenceSetError, match=r"at least 2 examples with an answer.*there are 1"):
        split_reference(context, 0.15, 0)


def own_loss(model: Any, batch: Batch) -> torch.Tensor:
    """The loss as the transformers library computes it, balancing included."""
    labels = batch.ids.clone()
    labels[:, 1:][~batch.scored[:, :-1]] = -100
    labels[:, 0] = -100
    inputs = {"input_ids": batch.ids, "attention_mask": batch.real.long(), "labels": labels}
    loss: torch.Tensor = model(**inputs, use_cache=False, output_router_logits=True).loss
    return loss


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_the_losses_are_those_of_transformers(name: str, tiny_tokenizer: Any) -> None:
    model = trained(name)
    split = quiz_split(model, tiny_tokenizer)
    batch = split.batch(split.train)
    assert model.config.router_aux_loss_coef > 0
    with torch.no_grad():
        assert training_loss(model, batch).item() == pytest.approx(
            own_loss(model, batch).item(), rel=1e-5
        )
        model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.0
        everything = TrainingSplit(split.tokens, [], split.train)
        assert validation_loss(model, everything, 3) == pytest.approx(
            own_loss(model, batch).item(), rel=1e-5
        )


@pytest.mark.parametrize(
    ("unfreeze", "name"),
    [
        (add_adapters, "tiny-olmoe"),
        (add_adapters, "tiny-gpt-oss"),
        (unfreeze_routers, "tiny-qwen3"),
    ],
)
@pytest.mark.slow
def test_the_loop_is_plain_adamw(unfreeze: Any, name: str, tiny_tokenizer: Any) -> None:
    """Against a loop written out here: torch's AdamW, transformers' loss, a linear schedule."""
    model = trained(name)
    split = quiz_split(model, tiny_tokenizer)
    torch.manual_seed(0)
    with unfreeze(model, TWO_EPOCHS) as trainable:
        run = train(trainable, split, 3e-3, TWO_EPOCHS, seed=0)
    torch.manual_seed(0)
    with unfreeze(model, TWO_EPOCHS) as trainable:
        optimiser = torch.optim.AdamW(trainable.parameters, weight_decay=0.01)
        losses = []
        for epoch in range(2):
            order = random.Random(f"0 {epoch}").sample(split.train, 8)
            for start in (0, 4):
                optimiser.param_groups[0]["lr"] = 3e-3 * (1 - len(losses) / 4)
                trainable.model.train()
                loss = own_loss(trainable.model, split.batch(order[start : start + 4]))
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(trainable.parameters, 1.0)
                optimiser.step()
                losses.append(loss.item())
        trainable.model.eval()
        last = validation_loss(trainable.model, split, 4)
    assert run.losses == pytest.approx(losses, rel=1e-3)
    assert run.losses[0] == pytest.approx(losses[0], rel=1e-5)
    assert run.validation[-1] == pytest.approx(last, rel=1e-3)
    assert last < validation_loss(model, split, 4) - 0.1


@pytest.mark.slow
def test_the_best_epoch_is_kept(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    """With far too high a rate the loss rises again, and an earlier epoch's weights count."""
    split = quiz_split(tiny_olmoe, tiny_tokenizer)
    config = TuneConfig(epochs=3, batch_size=4)
    with unfreeze_routers(tiny_olmoe, config) as trainable:
        run = train(trainable, split, 0.5, config, seed=0)
    assert run.changes is not None
    assert run.validation[-1] > run.best_loss == min(run.validation)
    with apply_changes(tiny_olmoe, run.changes):
        again = validation_loss(tiny_olmoe, split, 4)
    assert again == pytest.approx(run.best_loss, rel=1e-5)


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
