"""What is compared: a way to answer, put on a model for a while.

Most methods change the model until they are taken off again; some ask in other words; some do
something of their own for each batch. Knows questions and how batches are answered; nothing of
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from knn_moe.tasks.answers import Answer
from knn_moe.tasks.questions import Question


class Method:
    """The model alone, unless a subclass does more. Every method leaves the model as it was."""

    name: str = "zero-shot"

    def facts(self) -> Mapping[str, Any]:
        """What a reader of the results must know, as JSON takes it."""
        return {}

    def on(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Put it on a model until the context is left."""
        return nullcontext()

    def reword(self, questions: Sequence[Question]) -> list[Question]:
        """The same questions, perhaps in a prompt of its own; ids and hashes stay."""
        return list(questions)

    def answering(
        self, model: nn.Module, answer: Answer, batches: Sequence[Sequence[Question]]
    ) -> Answer:
        """How a batch is answered, inside `on`. `answer` asks the model as it then is; `batches`
        are all there will be, for a method that must see them before it begins."""
        return answer


class ZeroShot(Method):
    """The model alone."""


def prepare_zero_shot(setting: object) -> ZeroShot:
    return ZeroShot()
