"""What tests of fine-tuning share: a small quiz, and a watch over what must stay as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from knn_moe.methods.task_context import TaskContext
from knn_moe.methods.training_loop import (
    TuneConfig,
)
from knn_moe.tasks import Choice, Task, TaskData

ONE_RATE = TuneConfig(learning_rates=(1e-3,), rank=4, epochs=2, batch_size=4)
QUICK = TuneConfig(learning_rates=(1e-2,), rank=4, epochs=1, batch_size=4, trainer="plain")


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


def quiz_context(model: Any, tokenizer: Any, quiz: TaskData, **more: Any) -> TaskContext:
    return TaskContext(model, tokenizer, quiz, "likelihood", **more)


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


@pytest.fixture(scope="module")
def quiz() -> TaskData:
    task = Task(name="quiz", title="Quiz", kind=Choice(), files="quiz")
    return TaskData(task, rows(6, 100), rows(10), "made up")
