"""What C3PO learns from: the reference questions a model answers correctly, and how it routes them.

How a pathway is then chosen is in c3po.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from knn_moe.errors import ConfigError
from knn_moe.methods.own_embeddings import Embed, find_embedder
from knn_moe.methods.pathways import LastLayers, PausedPrompts, find_last_layers
from knn_moe.methods.task_context import TaskContext
from knn_moe.reference.examples import Example, tokenise
from knn_moe.routers.model_state import freeze
from knn_moe.support.progress import Progress
from knn_moe.tasks import questions as q
from knn_moe.tasks.answers import make_answer
from knn_moe.tasks.questions import Question
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, Kind


@dataclass(frozen=True, kw_only=True)
class C3poConfig:
    """The published values, and choices for what the publication leaves open.

    `learning_rate` falls along a cosine to `final_learning_rate` in the last step.
    """

    critical_layers: int = 5
    core_experts: int = 20
    neighbours: int = 3
    too_similar: float = 0.95  # cosine above which a neighbour may be the same question
    # Width of the Gaussian weights. None: the neighbours' root mean squared distance.
    bandwidth: float | None = None
    steps: int = 10  # of gradient descent and of mode finding
    learning_rate: float = 1e-2
    final_learning_rate: float = 1e-5
    alphas: tuple[float, ...] = tuple(part / 10 for part in range(10, -1, -1))
    mode_alpha: float = 0.5
    answer_tokens: int | None = None  # that count in ℓ; None: 1 by likelihood, 16 by generation
    gradient: str = "sparse"  # or "dense": through all experts, as in BuildConfig
    embedding: str | None = None  # a name, or "own"; None: the default of embedding.py

    def __post_init__(self) -> None:
        for name in ("critical_layers", "core_experts", "neighbours", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if self.steps < 0:
            raise ConfigError(f"steps must be at least 0, got {self.steps}.")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ConfigError(f"bandwidth must be greater than 0, got {self.bandwidth}.")
        if not self.alphas or not all(0 <= part <= 1 for part in (*self.alphas, self.mode_alpha)):
            raise ConfigError(
                f"alphas and mode_alpha must be between 0 and 1, got {self.alphas} and "
                f"{self.mode_alpha}."
            )
        if self.gradient not in ("sparse", "dense"):
            raise ConfigError(f"gradient must be 'sparse' or 'dense', got {self.gradient!r}.")

    def rate(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0."""
        share = (1 + math.cos(math.pi * step / max(self.steps - 1, 1))) / 2
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * share


@dataclass(frozen=True)
class SolvedReference:
    """The reference questions that the model answers correctly, of `total`.

    Shapes: keys [M, d], the embedded questions; routing [M, L, N]; both fp32 on the CPU.
    """

    questions: list[Question] = field(repr=False)
    answers: list[list[int]] = field(repr=False)  # token ids, as many as count
    keys: Tensor = field(repr=False)
    routing: Tensor = field(repr=False)
    total: int
    kind: Kind
    embed: Embed = field(repr=False)
    config: C3poConfig  # that it was prepared with

    def read(self, layers: LastLayers, places: Sequence[int]) -> PausedPrompts:
        """Read some of the questions up to the last layers."""
        ids = [self.questions[place].ids for place in places]
        return layers.read(ids, [self.answers[place] for place in places])


def solve_reference(context: TaskContext, config: C3poConfig) -> SolvedReference:
    """Let the model answer the reference set; keep what it answers correctly and its routing.

    Raises:
        ConfigError: There is no embedding model.
    """
    embed = find_embedder(context, config.embedding)
    with torch.inference_mode(False), freeze(context.model):
        questions = _make_questions(context)
        solved = _find_solved(context, questions)
        layers = find_last_layers(context.model, config.critical_layers)
        kept = [questions[place] for place in solved]
        routing = torch.zeros(len(kept), len(layers.routers), layers.routers[0].num_experts)
        for places in q.batch_by_length(kept, context.batch_size, one_length=False):
            routing[places] = layers.read([kept[place].ids for place in places]).own_routing.cpu()
    kind = context.data.task.kind
    texts = [kind.question(question.row) for question in kept]
    count = config.answer_tokens or (1 if context.scoring == LIKELIHOOD else 16)
    answers = [
        _answer_ids(context.tokenizer, questions[place], context.examples[place])[:count]
        for place in solved
    ]
    keys = embed(texts) if texts else torch.zeros(0, 1)
    return SolvedReference(kept, answers, keys, routing, len(questions), kind, embed, config)


def _make_questions(context: TaskContext) -> list[Question]:
    named = [(str(number), row) for number, row in enumerate(context.rows)]
    make = q.make_prompts if context.scoring == GENERATION else q.make_choices
    return make(context.tokenizer, context.data, named)


def _find_solved(context: TaskContext, questions: Sequence[Question]) -> list[int]:
    """Return the places of the questions the model answers correctly, scored as the task is."""
    generated = context.scoring == GENERATION
    answer = make_answer(context.model, context.tokenizer, context.data.task, context.scoring)
    solved: list[int] = []
    done = 0
    for places in q.batch_by_length(questions, context.batch_size, one_length=not generated):
        samples = answer([questions[place] for place in places], 0)
        solved += [place for place, got in zip(places, samples, strict=True) if got.score == 1]
        done += len(places)
        context.on_progress(Progress("answering the reference set", done, len(questions)))
    return sorted(solved)


def _answer_ids(tokenizer: Any, question: Question, example: Example) -> list[int]:
    """Return the tokens of the right answer."""
    if question.options is not None:
        return question.choices[question.options.answer][0]
    whole, length = tokenise(example, tokenizer).ids, len(question.ids)
    if whole[:length] == question.ids and len(whole) > length:
        return whole[length:]
    # The prompt's end and the answer's beginning share a token: tokenise the answer by itself.
    messages = example.messages
    text = messages[-1]["content"] if messages else example.completion
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
