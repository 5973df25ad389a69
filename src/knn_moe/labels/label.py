"""Make examples from prompts: answer them with the model, score the answers, keep the best."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from knn_moe.errors import ConfigError, LabelError
from knn_moe.labels.agreement import majority
from knn_moe.labels.answers import generate_answers, score_confidence
from knn_moe.labels.config import AGREEMENT, JUDGE, LabelConfig
from knn_moe.labels.prompts import load_prompts
from knn_moe.reference.examples import Example
from knn_moe.reference.load import Examples
from knn_moe.support.files import write_whole
from knn_moe.support.progress import OnProgress, Progress, ignore_progress

# (prompt, answer) → whether it is right, or how right; NaN: no verdict
Judge: TypeAlias = Callable[[str, str], bool | float]


@dataclass(frozen=True)
class Labelled:
    """A prompt with an answer of the model, and the score of the answer.

    The score is NaN if the answer is empty or the judge gave no verdict; it is not kept then.
    """

    example: Example
    score: float
    kept: bool


def label(
    model: nn.Module,
    tokenizer: Any,
    prompts: Examples,
    config: LabelConfig | None = None,
    *,
    judge: Judge | None = None,
    on_progress: OnProgress = ignore_progress,
) -> list[Labelled]:
    """Answer every prompt with the model, score the answers, and mark those worth keeping.

    The same seed and batch size give the same answers. A memory that is attached is used.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        prompts: All that `load_examples` takes, without the answers; a text file has one per line.
        config: How to answer, to score and to choose. None: the defaults.
        judge: For `by="judge"`: any function of a prompt and an answer.
        on_progress: Called after each batch and after each verdict.

    Returns:
        One item for each prompt, in order.

    Raises:
        ConfigError: `by="judge"` without a judge, or a judge without it.
        ReferenceSetError: A prompt cannot be read.
        LabelError: There are no prompts, one is too long, or the judge fails.
    """
    config = config or LabelConfig()
    if (judge is not None) != (config.by == JUDGE):
        raise ConfigError(
            f"by='judge' and judge=… go together, got by={config.by!r} and "
            f"{'a' if judge else 'no'} judge."
        )
    items = load_prompts(prompts)
    if not items:
        raise LabelError("There are no prompts to label.")
    ids = [item.tokens(tokenizer) for item in items]
    generated = generate_answers(model, tokenizer, ids, config, on_progress)
    labels = [majority(answers, config.same) for answers in generated]
    examples = [item.with_answer(each.answer) for item, each in zip(items, labels, strict=True)]
    answered = [place for place, each in enumerate(labels) if each.answer.strip()]
    if config.by == AGREEMENT:
        found = [labels[place].share for place in answered]
    elif judge is not None:
        pairs = [(items[place].as_text(), labels[place].answer.strip()) for place in answered]
        found = _ask_judge(judge, pairs, on_progress)
    else:
        chosen = [examples[place] for place in answered]
        found = score_confidence(model, tokenizer, chosen, config.batch_size, on_progress)
    by_place = dict(zip(answered, found, strict=True))
    scores = [by_place.get(place, math.nan) for place in range(len(items))]
    return list(map(Labelled, examples, scores, select_kept(scores, config)))


def _ask_judge(
    judge: Judge, pairs: Sequence[tuple[str, str]], on_progress: OnProgress
) -> list[float]:
    scores = []
    for number, (prompt, answer) in enumerate(pairs, start=1):
        scores.append(as_score(judge(prompt, answer)))
        on_progress(Progress("judging", number, len(pairs)))
    if scores and all(map(math.isnan, scores)):
        raise LabelError(
            f"The judge gave no verdict on any of {len(scores)} answers. It must return a number."
        )
    return scores


def as_score(verdict: bool | float) -> float:
    """Return a judge's verdict as a number.

    Raises:
        LabelError: It is not a number.
    """
    try:
        return float(verdict)
    except (TypeError, ValueError):
        raise LabelError(f"A judge must return a number or a bool, got {verdict!r}.") from None


def select_kept(scores: Sequence[float], config: LabelConfig) -> list[bool]:
    """Return for each score whether its answer is kept.

    With a threshold, these are all scores of at least that. With `keep`, they are that share of
    all prompts, rounded up: those with the highest scores, the first of equal ones. NaN is never
    kept.
    """
    if config.threshold is not None:
        return [score >= config.threshold for score in scores]
    known = [place for place, score in enumerate(scores) if not math.isnan(score)]
    best = sorted(known, key=lambda place: -scores[place])
    kept = set(best[: math.ceil((config.keep or 0) * len(scores))])
    return [place in kept for place in range(len(scores))]


def save_labelled(path: Path, labelled: Iterable[Labelled]) -> None:
    """Write the answers that are kept, with their scores, as JSON lines for a build.

    Raises:
        LabelError: None is kept.
    """
    rows = [_as_row(each) for each in labelled if each.kept]
    if not rows:
        raise LabelError("No answer was kept. Lower the threshold, or change the prompts.")
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _as_row(labelled: Labelled) -> dict[str, Any]:
    example = labelled.example
    if example.messages is not None:
        row: dict[str, Any] = {"messages": [dict(message) for message in example.messages]}
    else:
        row = {"prompt": example.prompt, "completion": example.completion}
    return {**row, "score": round(labelled.score, 6)}


def summarise(labelled: Sequence[Labelled]) -> dict[str, Any]:
    """Return how many answers are kept, and the quartiles of the scores, as JSON takes it."""
    scores = np.array([each.score for each in labelled if not math.isnan(each.score)])
    names = ("least", "lower_quarter", "median", "upper_quarter", "most")
    quartiles = np.quantile(scores, (0, 0.25, 0.5, 0.75, 1)).tolist() if len(scores) else []
    return {
        "prompts": len(labelled),
        "kept": sum(each.kept for each in labelled),
        "unscored": len(labelled) - len(scores),
        "scores": {name: round(each, 4) for name, each in zip(names, quartiles, strict=False)},
    }
