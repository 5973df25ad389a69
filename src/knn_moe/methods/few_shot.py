"""Five solved questions of the reference set before each question (§5.1, "5-shot").

Those whose questions are most similar, by the cosine of their sentence embeddings. The paper does
not say in which order: here the most similar stands last, next to the question. Knows prompts and
tokens; nothing of how they are answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.errors import ConfigError
from knn_moe.methods.embedding import Embedder, embedder
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.tasks import prompts
from knn_moe.tasks.kinds import Choice
from knn_moe.tasks.questions import Question, encode_choices, encode_prompt
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, TEXT, Kind, Row

SHOTS: Final = 5


@dataclass
class FewShot(Method):
    """Asks in a prompt of its own; the model is not touched.

    Where such a prompt would be longer than the model reads, the shots that are least similar are
    left out; without any, the question is asked as zero-shot asks it.
    """

    context: TaskContext = field(repr=False)
    embed: Embedder
    vectors: Tensor = field(repr=False)  # of the reference questions [n, d], of length 1
    shortened: int | None = None  # prompts that lost shots; None: nothing was asked yet
    name: str = "5-shot"

    def facts(self) -> Mapping[str, Any]:
        return {
            "shots": SHOTS,
            "order": "most similar last",
            "embedding": self.embed.name,
            "reference": len(self.vectors),
            "shortened": self.shortened,
        }

    def reword(self, questions: Sequence[Question]) -> list[Question]:
        kind = self.context.data.task.kind
        asked = self.embed([kind.question(question.row) for question in questions])
        self.shortened, made = 0, []
        for question, vector in zip(questions, asked, strict=True):
            shots = self._similar(vector)
            reworded, used = self._fitting(question, shots)
            self.shortened += used < len(shots)
            made.append(reworded)
        return made

    def _similar(self, vector: Tensor) -> list[Row]:
        """The rows to show, the most similar last. Shape: vector [d]."""
        order = torch.argsort(self.vectors @ vector, descending=True, stable=True)[:SHOTS]
        return [self.context.rows[place] for place in reversed(order.tolist())]

    def _fitting(self, question: Question, shots: Sequence[Row]) -> tuple[Question, int]:
        """With as many of the last shots as fit, and how many these are."""
        for count in range(len(shots), 0, -1):
            reworded = self._with(question, shots[-count:])
            longest = max((len(ids) for ids, _ in reworded.choices), default=0)
            if len(reworded.ids) + longest <= self._room():
                return reworded, count
        return question, 0

    def _with(self, question: Question, shots: Sequence[Row]) -> Question:
        """The question behind its shots: other token ids, and nothing else."""
        kind, tokenizer = self.context.data.task.kind, self.context.tokenizer
        if self.context.scoring == LIKELIHOOD:
            options = kind.options(question.row)
            context = cloze_prompt(kind, shots, options.context)
            found = encode_choices(tokenizer, replace(options, context=context))
            if found is None:
                raise ConfigError(f"Question {question.id} has a choice of no tokens behind shots.")
            return replace(question, ids=found[0], choices=found[1])
        return replace(
            question, ids=encode_prompt(tokenizer, shown_prompt(kind, shots, question.row))
        )

    def _room(self) -> float:
        """Tokens a prompt may have: what the model reads, less what it is to write."""
        config: Any = getattr(self.context.model, "config", None)
        most = getattr(config, "max_position_embeddings", None)
        if not most:
            return float("inf")
        written = self.context.data.task.kind.max_new_tokens
        return float(most - (written if self.context.scoring == GENERATION else 0))


def shown_prompt(kind: Kind, shots: Sequence[Row], row: Row) -> str:
    """To be answered in words: the paper's prompt (appendix A) for choices; for what it has no
    words for, solved prompts one after the other."""
    if isinstance(kind, Choice):
        solved = [prompts.Shot(shot["question"], shot["choices"], shot["answer"]) for shot in shots]
        return prompts.few_shot(solved, row["question"], row["choices"])
    blocks = (f"{kind.prompt(shot)}\n{kind.completion(shot)}" for shot in shots)
    return "\n\n".join((*blocks, kind.prompt(row)))


def cloze_prompt(kind: Kind, shots: Sequence[Row], context: str) -> str:
    """To be answered by likelihood: contexts with their right choices, before a context."""
    solved = (kind.options(shot) for shot in shots)
    blocks = (each.context + each.continuations[each.answer] for each in solved)
    return "\n\n".join((*blocks, context))


def prepare_few_shot(context: TaskContext) -> FewShot:
    task = context.data.task
    if context.scoring == TEXT:
        raise ConfigError(
            f"{task.name} is text, in which nothing is asked: 5-shot is not defined for it. Leave "
            f"the method out."
        )
    embed = embedder()
    vectors = embed([task.kind.question(row) for row in context.rows])
    return FewShot(context, embed, vectors)
