"""Examples from prompts: answered by the model, scored, the best kept.

Puts together the answers (answers.py), what they are scored by, and what is written down.
"""

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
from knn_moe.labels.agreement import Majority, majority
from knn_moe.labels.answers import answers_of, confidences
from knn_moe.labels.config import AGREEMENT, JUDGE, LabelConfig
from knn_moe.labels.prompts import Prompt, PromptLike, load_prompts
from knn_moe.reference.examples import Example
from knn_moe.support.files import write_whole
from knn_moe.support.progress import OnProgress, Progress, ignore_progress

# prompt and answer → whether it is right, or how right; nan: no verdict
Judge: TypeAlias = Callable[[str, str], bool | float]


@dataclass(frozen=True)
class Labelled:
    """A prompt with an answer of the model's own. No score (nan): nothing was said, or no verdict
    given; such are never kept."""

    example: Example
    score: float
    kept: bool


def label(
    model: nn.Module,
    tokenizer: Any,
    prompts: str | Path | Iterable[PromptLike],
    config: LabelConfig | None = None,
    *,
    judge: Judge | None = None,
    on_progress: OnProgress = ignore_progress,
) -> list[Labelled]:
    """Answer every prompt with the model, score the answers, and mark those worth keeping.

    One for each prompt, in order. The same seed and batch size give the same. A judge is any
    function of prompt and answer; a memory on the model is used.
    """
    config = config or LabelConfig()
    if (judge is not None) != (config.by == JUDGE):
        raise ConfigError(
            f"by='judge' and a judge go together, got by={config.by!r} and "
            f"{'a' if judge else 'no'} judge."
        )
    asked = load_prompts(prompts)
    if not asked:
        raise LabelError("There are no prompts to label.")
    work = _Work(model, tokenizer, config, judge, on_progress)
    # Of one answer, the majority is that answer.
    labels = [majority(given, config.same) for given in work.answers(asked)]
    examples = [one.answered(said.answer) for one, said in zip(asked, labels, strict=True)]
    scores = work.scores(asked, labels, examples)
    kept = chosen(scores, config)
    return [Labelled(*each) for each in zip(examples, scores, kept, strict=True)]


@dataclass(frozen=True)
class _Work:
    """Who answers, how, and who is told how far it is."""

    model: nn.Module
    tokenizer: Any
    config: LabelConfig
    judge: Judge | None
    report: OnProgress

    def answers(self, prompts: Sequence[Prompt]) -> list[list[str]]:
        ids = [prompt.tokens(self.tokenizer) for prompt in prompts]

        def done(count: int) -> None:
            self.report(Progress("answering", count, len(ids)))

        return answers_of(self.model, self.tokenizer, ids, self.config, done)

    def scores(
        self, prompts: Sequence[Prompt], labels: Sequence[Majority], examples: Sequence[Example]
    ) -> list[float]:
        """One for each; nan where nothing was said."""
        told = [place for place, said in enumerate(labels) if said.answer.strip()]
        if self.config.by == AGREEMENT:
            found = [labels[place].share for place in told]
        elif self.judge is not None:
            pairs = [(prompts[place].shown(), labels[place].answer.strip()) for place in told]
            found = self._verdicts(self.judge, pairs)
        else:
            found = self._confidences([examples[place] for place in told])
        scores = [math.nan] * len(prompts)
        for place, score in zip(told, found, strict=True):
            scores[place] = score
        return scores

    def _confidences(self, examples: Sequence[Example]) -> list[float]:
        def done(count: int) -> None:
            self.report(Progress("scoring", count, len(examples)))

        return confidences(self.model, self.tokenizer, examples, self.config.batch_size, done)

    def _verdicts(self, judge: Judge, pairs: Sequence[tuple[str, str]]) -> list[float]:
        found = []
        for number, (prompt, answer) in enumerate(pairs, start=1):
            verdict = judge(prompt, answer)
            try:
                found.append(float(verdict))
            except (TypeError, ValueError):
                raise LabelError(f"A judge says a number or a bool, got {verdict!r}.") from None
            self.report(Progress("judging", number, len(pairs)))
        if found and all(map(math.isnan, found)):
            raise LabelError(
                f"Of {len(found)} answers the judge gave no verdict on any: it should say a number."
            )
        return found


def chosen(scores: Sequence[float], config: LabelConfig) -> list[bool]:
    """Which are kept: a share of all, rounded up, the highest, the first of equals; or those of at
    least the threshold."""
    if config.threshold is not None:
        return [score >= config.threshold for score in scores]
    known = [place for place, score in enumerate(scores) if not math.isnan(score)]
    best = sorted(known, key=lambda place: -scores[place])
    wanted = set(best[: math.ceil((config.keep or 0) * len(scores))])
    return [place in wanted for place in range(len(scores))]


def save_labelled(path: Path, labelled: Iterable[Labelled]) -> None:
    """What was kept, as JSON lines that a memory is built from, with the scores; whole or not."""
    rows = [_row(each) for each in labelled if each.kept]
    if not rows:
        raise LabelError("No answer was worth keeping: lower the threshold, or ask otherwise.")
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _row(labelled: Labelled) -> dict[str, Any]:
    example = labelled.example
    if example.messages is not None:
        said: dict[str, Any] = {"messages": [dict(message) for message in example.messages]}
    else:
        said = {"prompt": example.prompt, "completion": example.completion}
    return {**said, "score": round(labelled.score, 6)}


def summary(labelled: Sequence[Labelled]) -> dict[str, Any]:
    """How many were kept, and how the scores lie, as JSON takes it."""
    scores = np.array([each.score for each in labelled if not math.isnan(each.score)])
    names = ("least", "lower_quarter", "median", "upper_quarter", "most")
    places = np.quantile(scores, (0, 0.25, 0.5, 0.75, 1)).tolist() if len(scores) else []
    return {
        "prompts": len(labelled),
        "kept": sum(each.kept for each in labelled),
        "unscored": len(labelled) - len(scores),
        "scores": {name: round(place, 4) for name, place in zip(names, places, strict=False)},
    }
