"""Five solved questions of the reference set before each question (§5.1, "5-shot").

The most similar ones are shown, by the cosine of their sentence embeddings. The paper does not say
in which order; here the most similar stands last, next to the question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.errors import ConfigError
from knn_moe.methods.method import Method
from knn_moe.methods.own_embeddings import Embed, find_embedder
from knn_moe.methods.task_context import TaskContext
from knn_moe.routers.model_state import max_positions
from knn_moe.tasks import prompts
from knn_moe.tasks.kinds import Choice
from knn_moe.tasks.questions import Question, encode_choices, encode_prompt
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, Kind, Row

SHOTS: Final = 5


@dataclass
class FewShot(Method):
    """Solved questions in the prompt; the model is not changed.

    If a prompt would be longer than the model can read, the least similar shots are left out. A
    question without any shot is asked as in zero-shot.
    """

    context: TaskContext = field(repr=False)
    embed: Embed
    vectors: Tensor = field(repr=False)  # unit vectors [n, d] of the reference questions
    shortened: int | None = None  # number of prompts that lost shots; None: nothing asked yet
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
        queries = self.embed([kind.question(question.row) for question in questions])
        shots = [self._choose_shots(query) for query in queries]
        self.shortened = 0
        reworded = self._add_shots(questions, shots)
        for place, few in enumerate(shots):
            if not self._fits(reworded[place]):
                self.shortened += 1
                reworded[place] = self._add_what_fits(questions[place], few[1:])
        return reworded

    def _choose_shots(self, vector: Tensor) -> list[Row]:
        """Return the rows to show, the most similar last. Shape: vector [d]."""
        order = torch.argsort(self.vectors @ vector, descending=True, stable=True)[:SHOTS]
        return [self.context.rows[place] for place in reversed(order.tolist())]

    def _add_what_fits(self, question: Question, shots: Sequence[Row]) -> Question:
        """Return the question with as many of the last shots as fit."""
        for count in range(len(shots), 0, -1):
            (reworded,) = self._add_shots([question], [shots[-count:]])
            if self._fits(reworded):
                return reworded
        return question

    def _fits(self, question: Question) -> bool:
        longest = max((len(ids) for ids, _ in question.choices), default=0)
        return len(question.ids) + longest <= self._longest_prompt()

    def _add_shots(
        self, questions: Sequence[Question], shots: Sequence[Sequence[Row]]
    ) -> list[Question]:
        """Return the questions with other token ids, in which the shots of each come first."""
        kind, tokenizer = self.context.data.task.kind, self.context.tokenizer
        if self.context.scoring != LIKELIHOOD:
            texts = [
                generation_prompt(kind, few, question.row)
                for question, few in zip(questions, shots, strict=True)
            ]
            return [
                replace(question, ids=encode_prompt(tokenizer, text))
                for question, text in zip(questions, texts, strict=True)
            ]
        asked = [kind.options(question.row) for question in questions]
        asked = [
            replace(options, context=cloze_prompt(kind, few, options.context))
            for options, few in zip(asked, shots, strict=True)
        ]
        reworded = []
        for question, found in zip(questions, encode_choices(tokenizer, asked), strict=True):
            if found is None:
                raise ConfigError(
                    f"A choice of question {question.id} has no tokens of its own after the shots. "
                    f"Leave out 5-shot for this task."
                )
            reworded.append(replace(question, ids=found[0], choices=found[1]))
        return reworded

    def _longest_prompt(self) -> float:
        """Return how many tokens a prompt may have, with room for what is generated."""
        readable = max_positions(self.context.model)
        if not readable:
            return float("inf")
        generated = self.context.data.task.kind.max_new_tokens
        return float(readable - (generated if self.context.scoring == GENERATION else 0))


def generation_prompt(kind: Kind, shots: Sequence[Row], row: Row) -> str:
    """Return the prompt of a generated answer.

    For multiple choice it is the paper's (appendix A). Other kinds, for which the paper has none,
    get solved prompts one after the other.
    """
    if isinstance(kind, Choice):
        solved = [prompts.Shot(shot["question"], shot["choices"], shot["answer"]) for shot in shots]
        return prompts.few_shot(solved, row["question"], row["choices"])
    blocks = (f"{kind.prompt(shot)}\n{kind.completion(shot)}" for shot in shots)
    return "\n\n".join((*blocks, kind.prompt(row)))


def cloze_prompt(kind: Kind, shots: Sequence[Row], question: str) -> str:
    """Return the prompt of an answer by likelihood: shots with their right choices, then it."""
    solved = (kind.options(shot) for shot in shots)
    blocks = (each.context + each.continuations[each.answer] for each in solved)
    return "\n\n".join((*blocks, question))


def prepare_few_shot(context: TaskContext) -> FewShot:
    """Embed the reference questions.

    Raises:
        ConfigError: There is no embedding model.
    """
    embed = find_embedder(context)
    vectors = embed([context.data.task.kind.question(row) for row in context.rows])
    return FewShot(context, embed, vectors)
