"""Recall only where it is likely to help: the paper's Selective variant (§6.1), and a cheap gate.

Knows which questions a model finds easy; how tokens are gated is gate.py's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from knn_moe.config import ENTROPY
from knn_moe.inference.attach import check_belongs
from knn_moe.methods.knn_moe import KnnMoe, prepare_knn
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.tasks.answers import Answer
from knn_moe.tasks.questions import Question
from knn_moe.tasks.sample import Sample


@dataclass
class Selective(Method):
    """With a memory, but for the third of the test questions that the model alone finds easiest.

    Transductive, as in the paper: which third that is, is known only once the model alone has read
    the whole test. It answers all of it first; the easy third keeps those answers, the others are
    asked again with the memory. Every sample is thus that of one of the two plain runs. Of a text,
    what is easy is told by the very loss that is reported.
    """

    knn: KnnMoe
    name: str = "knn-selective"
    _later: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    def facts(self) -> Mapping[str, Any]:
        return {
            **self.knn.facts(),
            "selected": "by the whole test: its third of lowest zero-shot perplexity is without "
            "memory",
        }

    @contextmanager
    def apply_to(self, model: nn.Module) -> Iterator[None]:
        """The memory comes on when the model alone is done, and off at the end."""
        check_belongs(model, self.knn.memory)
        with ExitStack() as self._later:
            yield

    def make_answer(
        self, model: nn.Module, answer: Answer, batches: Sequence[Sequence[Question]]
    ) -> Answer:
        alone = [answer(batch, number) for number, batch in enumerate(batches)]
        easy = lowest_third([sample for samples in alone for sample in samples])
        self._later.enter_context(self.knn.apply_to(model))

        def chosen(batch: Sequence[Question], number: int) -> list[Sample]:
            if all(sample.id in easy for sample in alone[number]):
                return alone[number]
            # The whole batch: by itself, a question might be rounded otherwise.
            pairs = zip(alone[number], answer(batch, number), strict=True)
            return [before if before.id in easy else after for before, after in pairs]

        return chosen


def lowest_third(samples: Sequence[Sample]) -> set[str]:
    """Ids of the third of lowest loss, as comparisons cut it: rounded up, ties by id. What has no
    loss, a prompt of one token, is not low."""

    def loss(sample: Sample) -> tuple[float, str]:
        return math.inf if sample.nll is None else sample.nll, sample.id

    ordered = sorted(samples, key=loss)
    return {sample.id for sample in ordered[: math.ceil(len(ordered) / 3)]}


def prepare_selective(context: TaskContext) -> Selective:
    return Selective(prepare_knn(context))


def prepare_gated(context: TaskContext) -> KnnMoe:
    """Token by token, by the router's own entropy: no pass more, and no test set seen before."""
    knn = prepare_knn(context)
    routing = knn.config or knn.memory.routing
    return replace(knn, config=replace(routing, gate=ENTROPY), name="knn-gated")
