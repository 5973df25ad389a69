"""What tests of fine-tuning share: a small quiz, quick configs and a split."""

from __future__ import annotations

from typing import Any

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
