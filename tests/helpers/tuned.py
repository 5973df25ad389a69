"""What tests of fine-tuning share: a small quiz, and a check that a model is left as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from knn_moe.methods.task_context import TaskContext
from knn_moe.methods.training_loop import TrainingSplit, TuneConfig, split_reference
from knn_moe.tasks import Choice, Task, TaskData

QUICK = TuneConfig(learning_rates=(1e-2,), rank=4, epochs=1, batch_size=4)
TWO_EPOCHS = TuneConfig(learning_rates=(1e-3,), rank=4, epochs=2, batch_size=4)


def _make_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "id": str(number),
            "question": f"What colour is thing number {number}{' again' * (number % 4)}?",
            "choices": ["red as rust", "blue", "green like old grass"],
            "answer": number % 3,
        }
        for number in range(first, first + count)
    ]


COLOURS = TaskData(
    Task(name="quiz", title="Quiz", kind=Choice(), files="quiz"),
    _make_rows(6, 100),
    _make_rows(10),
    "made up",
)


def quiz_context(model: Any, tokenizer: Any, **options: Any) -> TaskContext:
    return TaskContext(model, tokenizer, COLOURS, "likelihood", **options)


def quiz_split(model: Any, tokenizer: Any) -> TrainingSplit:
    """Eight examples to train on, two for validation; each is one window."""
    return split_reference(quiz_context(model, tokenizer), 0.2, 0)


def _snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a method must leave as it was, except for the weights' values."""
    return {
        "weights": [(name, each.data_ptr()) for name, each in model.state_dict().items()],
        "gradients": {name: each.grad for name, each in model.named_parameters()},
        "trainable": {name: each.requires_grad for name, each in model.named_parameters()},
        "modules": {
            name: (type(module), module.training, list(module._forward_hooks), sorted(vars(module)))
            for name, module in model.named_modules()
        },
        "configs": (model.config.to_dict(), model.generation_config.to_dict()),
        "experts": model.config._experts_implementation,
        "random states": (random.getstate(), str(np.random.get_state())),
        "torch's random state": torch.get_rng_state().tolist(),
    }


@contextmanager
def left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    model.train()  # as a user may have it
    model.model.embed_tokens.weight.requires_grad_(False)
    before = _snapshot(model)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    try:
        yield
        assert _snapshot(model) == before
        assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    finally:
        model.eval()
        model.model.embed_tokens.weight.requires_grad_(True)
