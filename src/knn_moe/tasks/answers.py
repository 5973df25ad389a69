"""A batch of questions put to a model, and what became of each: generation, likelihood, text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from knn_moe.errors import ModelError
from knn_moe.tasks.generation import continued
from knn_moe.tasks.kinds import Choice
from knn_moe.tasks.likelihood import choice_scores, mean_losses, token_losses
from knn_moe.tasks.prompts import LETTERS
from knn_moe.tasks.questions import Question, choice_tensors
from knn_moe.tasks.sample import Sample
from knn_moe.tasks.task import Task

# (questions of a batch, its number) → their samples
Answer: TypeAlias = Callable[[Sequence[Question], int], list[Sample]]


def by_likelihood(model: nn.Module) -> Answer:
    """The choice that is likeliest per character is taken: long ones would lose otherwise."""

    def answer(batch: Sequence[Question], number: int) -> list[Sample]:
        likelihoods, losses = choice_scores(model, *choice_tensors(batch))
        return [
            _judged(question, row, loss, number)
            for question, row, loss in zip(batch, likelihoods, losses.tolist(), strict=True)
        ]

    return answer


def _judged(question: Question, row: Tensor, loss: float, number: int) -> Sample:
    options = question.options
    if options is None:
        raise ValueError("A question without options cannot be answered by likelihood.")
    plain = row[: len(options.continuations)].tolist()
    if not all(map(math.isfinite, plain)):
        raise ModelError(
            f"The model gives no number for question {question.id}: try another --dtype."
        )
    lengths = [max(len(text.removeprefix(" ")), 1) for text in options.continuations]
    even = [value / length for value, length in zip(plain, lengths, strict=True)]
    best, second = sorted(even, reverse=True)[:2]
    chosen = even.index(best)
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


def by_generation(model: nn.Module, tokenizer: Any, task: Task, max_new_tokens: int) -> Answer:
    """The likeliest token after the other; what is said is parsed, as the task says."""

    def answer(batch: Sequence[Question], number: int) -> list[Sample]:
        losses = mean_losses(model, [question.ids for question in batch]).tolist()
        outputs = _generate(model, tokenizer, [question.ids for question in batch], max_new_tokens)
        samples = []
        for question, output, loss in zip(batch, outputs, losses, strict=True):
            verdict = task.kind.judge(output, question.row)
            shown = isinstance(task.kind, Choice) or not task.secret
            right = task.kind.completion(question.row) if shown else None
            samples.append(
                Sample(
                    id=question.id,
                    prompt=question.hash,
                    score=verdict.score,
                    nll=None if math.isnan(loss) else loss,
                    batch=number,
                    answer=right,
                    parsed=verdict.parsed if shown or verdict.parsed is None else "hidden",
                    output=None if task.secret else output,
                )
            )
        return samples

    return answer


def _generate(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[str]:
    written = continued(model, tokenizer, prompts, max_new_tokens)
    outputs: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
    return outputs


def by_token(model: nn.Module) -> Answer:
    """Windows of text: the share of tokens that are the likeliest, and the mean loss."""

    def answer(batch: Sequence[Question], number: int) -> list[Sample]:
        ids = torch.tensor([question.ids for question in batch])
        losses = token_losses(model, ids, len(batch))
        pairs = zip(
            losses.nll.mean(dim=1).tolist(), losses.correct.float().mean(dim=1), strict=True
        )
        return [
            Sample(
                id=question.id,
                prompt=question.hash,
                score=float(correct),
                nll=nll,
                batch=number,
            )
            for question, (nll, correct) in zip(batch, pairs, strict=True)
        ]

    return answer
