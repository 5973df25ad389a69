"""Put a batch of questions to a model and score it: by generation, by likelihood, or as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from knn_moe.errors import ModelError
from knn_moe.reference.choices import count_characters
from knn_moe.reference.quiz import LETTERS
from knn_moe.tasks.generation import generate_tokens
from knn_moe.tasks.kinds import Choice, count_choices
from knn_moe.tasks.likelihood import choice_scores, mean_losses, token_losses
from knn_moe.tasks.questions import Question, pad_choices
from knn_moe.tasks.sample import Sample
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, Task

# Answers a batch: (its questions, its number) → their samples.
Answer: TypeAlias = Callable[[Sequence[Question], int], list[Sample]]


def make_answer(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    scoring: str,
    max_new_tokens: int | None = None,
    *,
    prompt_losses: bool = True,
) -> Answer:
    """Return the function that puts a batch of questions to `model` and scores it.

    Args:
        model: The model, in the state it has when the function is called.
        scoring: "generation", "likelihood" or "text".
        max_new_tokens: For generation. None: the task's default.
        prompt_losses: Whether the losses of prompts are measured too.
    """
    if scoring == GENERATION:
        most = max_new_tokens or task.kind.max_new_tokens
        return by_generation(model, tokenizer, task, most, prompt_losses=prompt_losses)
    if scoring == LIKELIHOOD:
        return by_likelihood(model, prompt_losses=prompt_losses)
    return by_token(model)


def by_likelihood(model: nn.Module, *, prompt_losses: bool = True) -> Answer:
    """Choose the likeliest choice per character: by plain likelihood, long choices would lose."""

    def answer(batch: Sequence[Question], number: int) -> list[Sample]:
        asked = pad_choices(batch)
        likelihoods, losses = choice_scores(model, *asked, context_losses=prompt_losses)
        return [
            _judge_choices(question, row, loss, number)
            for question, row, loss in zip(batch, likelihoods, losses.tolist(), strict=True)
        ]

    return answer


def _judge_choices(question: Question, likelihoods: Tensor, loss: float, number: int) -> Sample:
    options = question.options
    if options is None:
        raise ValueError("A question without options cannot be answered by likelihood.")
    plain = likelihoods[: len(options.continuations)].tolist()
    if not all(map(math.isfinite, plain)):
        raise ModelError(
            f"The model's logits for question {question.id} are not finite. Try another --dtype."
        )
    lengths = [count_characters(text) for text in options.continuations]
    normalised = [value / length for value, length in zip(plain, lengths, strict=True)]
    best, second = sorted(normalised, reverse=True)[:2]
    chosen = normalised.index(best)
    return Sample(
        id=question.id,
        prompt=question.hash,
        score=float(chosen == options.answer),
        plain_score=float(plain.index(max(plain)) == options.answer),
        nll=None if math.isnan(loss) else loss,
        batch=number,
        answer=LETTERS[options.answer],
        parsed=LETTERS[chosen],
        likelihoods=tuple(round(value, 6) for value in plain),
        margin=best - second,
    )


def by_generation(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    max_new_tokens: int,
    *,
    prompt_losses: bool = True,
) -> Answer:
    """Generate greedily, and let the task's kind parse and judge the output."""

    def answer(batch: Sequence[Question], number: int) -> list[Sample]:
        prompts = [question.ids for question in batch]
        losses = [math.nan] * len(batch)
        if prompt_losses:
            losses = mean_losses(model, prompts).tolist()
        generated = generate_tokens(model, tokenizer, prompts, max_new_tokens)
        outputs = tokenizer.batch_decode(generated, skip_special_tokens=True)
        shown = isinstance(task.kind, Choice) or not task.secret
        samples = []
        for question, output, loss in zip(batch, outputs, losses, strict=True):
            verdict = task.kind.judge(output, question.row)
            samples.append(
                Sample(
                    id=question.id,
                    prompt=question.hash,
                    score=verdict.score,
                    nll=None if math.isnan(loss) else loss,
                    batch=number,
                    answer=task.kind.completion(question.row) if shown else None,
                    parsed=verdict.parsed if shown or verdict.parsed is None else "hidden",
                    output=None if task.secret else output,
                    choices=count_choices(task.kind, question.row),
                )
            )
        return samples

    return answer


def by_token(model: nn.Module) -> Answer:
    """Score windows of text: the share of tokens predicted correctly, and the mean loss."""

    def answer(batch: Sequence[Question], number: int) -> list[Sample]:
        ids = torch.tensor([question.ids for question in batch])
        losses = token_losses(model, ids, len(batch))
        means = losses.nll.mean(dim=1).tolist(), losses.correct.float().mean(dim=1).tolist()
        return [
            Sample(id=question.id, prompt=question.hash, score=correct, nll=nll, batch=number)
            for question, nll, correct in zip(batch, *means, strict=True)
        ]

    return answer
