"""Recall only where it is likely to help: the paper's Selective variant (§6.1).

This module knows which questions a model finds easy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from knn_moe.inference.attach import check_belongs
from knn_moe.methods.knn_moe import KnnMoe, prepare_knn
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.tasks.answers import Answer
from knn_moe.tasks.questions import Question
from knn_moe.tasks.sample import Sample


@dataclass
class SelectiveKnnMoe(Method):
    """kNN-MoE on the test questions except the third that the model alone finds easiest.

    It is transductive, as in the paper: the model alone first answers the whole test set. The third
    with the lowest loss keeps these answers; the other questions are asked again with the memory.
    Every sample thus equals that of one of the two plain runs. For a text, the loss that selects is
    the one that is reported.
    """

    knn: KnnMoe
    name: str = "knn-selective"
    _attached: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    def facts(self) -> Mapping[str, Any]:
        return {
            **self.knn.facts(),
            "selected": "the third of the test set with the lowest zero-shot perplexity is "
            "answered without the memory",
        }

    @contextmanager
    def apply_to(self, model: nn.Module) -> Iterator[None]:
        """Attach the memory once the model alone has answered; detach it on exit."""
        check_belongs(model, self.knn.memory)
        with ExitStack() as self._attached:
            yield

    def make_answer(
        self, model: nn.Module, answer: Answer, batches: Sequence[Sequence[Question]]
    ) -> Answer:
        zero_shot = [answer(batch, number) for number, batch in enumerate(batches)]
        easy = lowest_third([sample for samples in zero_shot for sample in samples])
        self._attached.enter_context(self.knn.apply_to(model))

        def answer_selectively(batch: Sequence[Question], number: int) -> list[Sample]:
            if all(sample.id in easy for sample in zero_shot[number]):
                return zero_shot[number]
            # Ask the whole batch: in another batch, a question might be rounded differently.
            pairs = zip(zero_shot[number], answer(batch, number), strict=True)
            return [before if before.id in easy else after for before, after in pairs]

        return answer_selectively


def lowest_third(samples: Sequence[Sample]) -> set[str]:
    """Return the ids of the third with the lowest loss, rounded up; ties are broken by id.

    A sample without a loss, such as a prompt of one token, counts as highest.
    """

    def loss(sample: Sample) -> tuple[float, str]:
        return math.inf if sample.nll is None else sample.nll, sample.id

    ordered = sorted(samples, key=loss)
    return {sample.id for sample in ordered[: math.ceil(len(ordered) / 3)]}


def prepare_selective(context: TaskContext) -> SelectiveKnnMoe:
    """Prepare kNN-MoE, to be used on the harder questions only."""
    return SelectiveKnnMoe(prepare_knn(context))
