"""What is compared: a way to answer questions with a model.

Most methods change the model while they are applied; some reword the questions; some do work of
their own for each batch. This module knows questions and how batches are answered, but no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from knn_moe.tasks.answers import Answer
from knn_moe.tasks.questions import Question


class Method:
    """The model alone; subclasses do more. Every method leaves the model as it was."""

    name: str = "zero-shot"

    def facts(self) -> Mapping[str, Any]:
        """Return what a reader of the results must know, for JSON."""
        return {}

    def apply_to(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager that changes `model` until it is left."""
        return nullcontext()

    def observe(self, attached: Any) -> Mapping[str, Any]:
        """Return what was counted meanwhile, for JSON; `attached` is what `apply_to` yielded."""
        return {}

    def reword(self, questions: Sequence[Question]) -> list[Question]:
        """Return the same questions, possibly with other prompts; ids and hashes stay."""
        return list(questions)

    def make_answer(
        self, model: nn.Module, answer: Answer, batches: Sequence[Sequence[Question]]
    ) -> Answer:
        """Return the function that answers a batch, to be called inside `apply_to`.

        Args:
            model: The model that answers.
            answer: Asks the model in its present state.
            batches: All batches there will be, for a method that must see them before it begins.
        """
        return answer


class ZeroShot(Method):
    """The model alone."""


def prepare_zero_shot(context: object) -> ZeroShot:
    """Return the model alone."""
    return ZeroShot()
