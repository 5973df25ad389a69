"""A task's reference set as examples, in the form in which its questions are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from knn_moe.errors import TaskDataError
from knn_moe.reference.examples import Example
from knn_moe.tasks.data import TaskData, draw
from knn_moe.tasks.questions import has_chat_template
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, Row


def reference_rows(data: TaskData, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Return the reference rows, in their order.

    Args:
        limit: Draw that many rows at random; None: all.
        seed: For the draw.

    Raises:
        TaskDataError: The task has no reference set.
    """
    if not data.reference:
        raise TaskDataError(
            f"{data.task.name} has no reference set in {data.source!r}. Use other data (--data), "
            f"or evaluate a memory that is there: knn-moe eval … --memory FOLDER."
        )
    return draw(data.reference, limit, seed)


def reference_examples(
    tokenizer: Any, data: TaskData, scoring: str, rows: Sequence[Row] | None = None
) -> list[Example]:
    """Return the reference rows as prompts with right answers.

    Args:
        tokenizer: If it has a chat template, generation prompts become chat messages.
        scoring: "generation", "likelihood" or "text": the form of the prompts.
        rows: The rows to convert. None: all reference rows.
    """
    chat = has_chat_template(tokenizer)
    rows = reference_rows(data) if rows is None else rows
    return [_make_example(data, row, scoring, chat) for row in rows]


def _make_example(data: TaskData, row: Row, scoring: str, chat: bool) -> Example:
    kind = data.task.kind
    if scoring == LIKELIHOOD:
        options = kind.options(row)
        right = options.continuations[options.answer]
        wrong = tuple(text for text in options.continuations if text != right)
        return Example(options.context, right, distractors=wrong)
    if scoring == GENERATION and chat:
        question = {"role": "user", "content": kind.prompt(row)}
        answer = {"role": "assistant", "content": kind.completion(row)}
        return Example(messages=(question, answer))
    prompt = kind.prompt(row)
    return Example(f"{prompt}\n" if prompt else "", kind.completion(row))
