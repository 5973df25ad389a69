"""A task's reference set as examples to remember, in the form in which it will be asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from knn_moe.errors import TaskDataError
from knn_moe.reference.examples import Example
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, Row


def reference_rows(data: TaskData, limit: int | None = None, seed: int = 0) -> list[Row]:
    """The rows to learn from; with a limit that many, drawn at random, in their own order."""
    rows = list(data.reference)
    if not rows:
        raise TaskDataError(
            f"{data.task.name} has no reference set here: give a memory with --memory."
        )
    if limit is not None and limit < len(rows):
        kept = sorted(random.Random(seed).sample(range(len(rows)), limit))
        rows = [rows[place] for place in kept]
    return rows


def reference_examples(
    tokenizer: Any, data: TaskData, scoring: str, rows: Sequence[Row] | None = None
) -> list[Example]:
    """Prompts with right answers: chat messages where the model has a template for them."""
    chat = bool(getattr(tokenizer, "chat_template", None))
    rows = reference_rows(data) if rows is None else rows
    return [_example(data, row, scoring, chat) for row in rows]


def _example(data: TaskData, row: Row, scoring: str, chat: bool) -> Example:
    kind = data.task.kind
    if scoring == LIKELIHOOD:
        options = kind.options(row)
        return Example(options.context, options.continuations[options.answer])
    if scoring == GENERATION and chat:
        asked = {"role": "user", "content": kind.prompt(row)}
        return Example(messages=(asked, {"role": "assistant", "content": kind.completion(row)}))
    prompt = kind.prompt(row)
    return Example(f"{prompt}\n" if prompt else "", kind.completion(row))
