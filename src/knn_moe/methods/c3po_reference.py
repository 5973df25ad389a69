"""What C3PO learns from: the reference questions a model answers correctly, and how it routed them.

Knows questions, answers and embeddings of texts; nothing of how a pathway is then chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from knn_moe.errors import ConfigError
from knn_moe.methods.pathways import Halted, Tail, last_layers
from knn_moe.methods.task_context import TaskContext
from knn_moe.reference.examples import Example, tokenise
from knn_moe.routers.model_state import freeze, input_device, unwrap
from knn_moe.support.progress import Progress
from knn_moe.tasks import questions as q
from knn_moe.tasks.answers import make_answer
from knn_moe.tasks.questions import Question
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, TEXT, Kind

OWN: Final = "own"  # the model's own input embeddings


class Embed(Protocol):
    """Texts as unit vectors [n, d] fp32, on the CPU."""

    @property
    def name(self) -> str: ...

    def __call__(self, texts: Sequence[str]) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class C3poConfig:
    """The published numbers, and what they leave open. `learning_rate` falls along a cosine to
    `final_learning_rate` in the last step."""

    critical_layers: int = 5
    core_experts: int = 20
    neighbours: int = 3
    too_similar: float = 0.95  # cosine above which a neighbour may be the same question
    bandwidth: float | None = (
        None  # of the kernel. None: the neighbours' root mean squared distance
    )
    steps: int = 10  # of descent and of mode finding
    learning_rate: float = 1e-2
    final_learning_rate: float = 1e-5
    alphas: tuple[float, ...] = tuple(part / 10 for part in range(10, -1, -1))
    mode_alpha: float = 0.5
    answer_tokens: int | None = None  # that count in ℓ. None: 1 by likelihood, 16 by generation
    gradient: str = "sparse"  # or "dense": through all experts, as in BuildConfig
    embedding: str | None = None  # a name, or "own". None: the usual one

    def __post_init__(self) -> None:
        for name in ("critical_layers", "core_experts", "neighbours", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if self.steps < 0:
            raise ConfigError(f"steps must be at least 0, got {self.steps}.")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ConfigError(f"bandwidth must be more than 0, got {self.bandwidth}.")
        if not self.alphas or not all(0 <= part <= 1 for part in (*self.alphas, self.mode_alpha)):
            raise ConfigError(f"α goes from 0 to 1, got {self.alphas} and {self.mode_alpha}.")
        if self.gradient not in ("sparse", "dense"):
            raise ConfigError(f"gradient is 'sparse' or 'dense', got {self.gradient!r}.")

    def rate(self, step: int) -> float:
        turn = math.cos(math.pi * step / max(self.steps - 1, 1))
        return (
            self.final_learning_rate
            + (self.learning_rate - self.final_learning_rate) * (1 + turn) / 2
        )


@dataclass(frozen=True)
class Reference:
    """What the model answers correctly of `total` rows. Shapes: keys [M, d], of the questions'
    texts; routing [M, L, N]; both fp32 on the CPU."""

    questions: list[Question] = field(repr=False)
    answers: list[list[int]] = field(repr=False)  # token ids, as many as count
    keys: Tensor = field(repr=False)
    routing: Tensor = field(repr=False)
    total: int
    kind: Kind
    embed: Embed = field(repr=False)
    config: C3poConfig  # it was prepared by

    def read(self, tail: Tail, places: Sequence[int]) -> Halted:
        ids = [self.questions[place].ids for place in places]
        return tail.read(ids, [self.answers[place] for place in places])


def successes(context: TaskContext, config: C3poConfig) -> Reference:
    """The reference set's questions that the model answers correctly, and how it routed them."""
    if context.scoring == TEXT:
        raise ConfigError(
            f"C3PO re-mixes the last token of a prompt, and {context.data.task.name} is scored as "
            f"running text, which has none: leave C3PO out for this task."
        )
    embed = _embed(context, config)
    with torch.inference_mode(False), freeze(context.model):
        asked = _asked(context)
        right = _right(context, asked)
        tail = last_layers(context.model, config.critical_layers)
        kept = [asked[place] for place in right]
        routing = torch.zeros(len(kept), *_shape(tail))
        for places in q.batch_by_length(kept, context.batch_size, one_length=False):
            routing[places] = tail.read([kept[place].ids for place in places]).own.cpu()
    kind = context.data.task.kind
    texts = [kind.question(question.row) for question in kept]
    count = config.answer_tokens or (1 if context.scoring == LIKELIHOOD else 16)
    answers = [
        _answer_ids(context.tokenizer, asked[place], context.examples[place])[:count]
        for place in right
    ]
    keys = embed(texts) if texts else torch.zeros(0, 1)
    return Reference(kept, answers, keys, routing, len(asked), kind, embed, config)


def _shape(tail: Tail) -> tuple[int, int]:
    return len(tail.routers), tail.routers[0].num_experts


def _asked(context: TaskContext) -> list[Question]:
    named = [(str(number), row) for number, row in enumerate(context.rows)]
    make = q.make_prompts if context.scoring == GENERATION else q.make_choices
    return make(context.tokenizer, context.data, named)


def _right(context: TaskContext, asked: Sequence[Question]) -> list[int]:
    """Places of the questions the model answers correctly, as it will be scored."""
    generated = context.scoring == GENERATION
    answer = make_answer(context.model, context.tokenizer, context.data.task, context.scoring)
    right: list[int] = []
    done = 0
    for places in q.batch_by_length(asked, context.batch_size, one_length=not generated):
        samples = answer([asked[place] for place in places], 0)
        right += [place for place, got in zip(places, samples, strict=True) if got.score == 1]
        done += len(places)
        context.on_progress(Progress("answering the reference set", done, len(asked)))
    return sorted(right)


def _answer_ids(tokenizer: Any, question: Question, example: Example) -> list[int]:
    """The right answer's tokens behind the prompt's last."""
    if question.options is not None:
        return question.choices[question.options.answer][0]
    whole, length = tokenise(example, tokenizer).ids, len(question.ids)
    if whole[:length] == question.ids and len(whole) > length:
        return whole[length:]
    # The prompt's end and the answer's beginning share a token: the answer by itself.
    messages = example.messages
    text = messages[-1]["content"] if messages else example.completion
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _embed(context: TaskContext, config: C3poConfig) -> Embed:
    if config.embedding == OWN:
        return OwnEmbeddings(context.model, context.tokenizer)
    from knn_moe.methods.embedding import embedder

    return embedder(config.embedding)


class OwnEmbeddings:
    """A text as the mean of its tokens' input embeddings: needs nothing but the model itself."""

    name = OWN

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        table = unwrap(self._model).get_input_embeddings()
        device = input_device(self._model)
        rows = (torch.tensor(self._tokenizer(text)["input_ids"], device=device) for text in texts)
        means = torch.stack([table(row).float().mean(dim=0) for row in rows])
        return torch.nn.functional.normalize(means, dim=1).cpu()
