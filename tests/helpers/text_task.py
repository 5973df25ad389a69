"""A task of running text for a small random model, whose words are token ids."""

from __future__ import annotations

from typing import Any

from helpers.zoo import make_texts
from knn_moe.methods import TaskContext
from knn_moe.tasks import Task, TaskData, Text

TEXT_TASK = Task(name="numbers", title="Numbers", kind=Text(), files="numbers")


def text_data(seed: int = 0) -> TaskData:
    """Return four test texts and six reference texts."""
    rows = [{"text": text} for text in make_texts(10, seed)]
    return TaskData(TEXT_TASK, rows[:4], rows[4:], "made up")


def make_text_context(model: Any, tokenizer: Any) -> TaskContext:
    """Return a context of three reference texts and the preset of the paper."""
    return TaskContext(model, tokenizer, text_data(), "text", limit=3, preset="paper")
