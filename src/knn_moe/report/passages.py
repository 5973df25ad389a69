"""Texts to be read token by token: the colour of each token, and what its panel says.

Knows explanations and losses; nothing of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from knn_moe.explain.explanation import ExplainedToken, RecalledCase
from knn_moe.report import words

# A token takes the next colour where its probability rose or fell by this factor.
FACTORS: Final = (1.1, 1.5, 2.0, 4.0)


@dataclass(frozen=True)
class Passage:
    """A text that a model read with a memory attached."""

    title: str
    tokens: tuple[ExplainedToken, ...]
    losses: tuple[tuple[float, float], ...]  # of every token but the first: without, with memory

    @property
    def gain(self) -> float:
        """Nats by which the memory raised the log-likelihood of the passage."""
        return sum(without - with_memory for without, with_memory in self.losses)


@dataclass(frozen=True)
class ShownToken:
    """A token on a page."""

    text: str
    classes: str  # for the style sheet
    panel: dict[str, Any]  # JSON: what the panel says, already in words


@dataclass(frozen=True)
class ShownPassage:
    """A passage on a page."""

    title: str
    summary: str
    tokens: tuple[ShownToken, ...]

    @property
    def panels(self) -> list[dict[str, Any]]:
        return [token.panel for token in self.tokens]


def show_passage(passage: Passage) -> ShownPassage:
    """Colour each token by the change of its probability.

    A token's panel shows the cases recalled at the token before it, which predicts it.
    """
    first, *others = (token.text for token in passage.tokens)
    tokens = [ShownToken(first, css_classes(first, 0), {"text": first, "cases": []})]
    for text, cause, losses in zip(others, passage.tokens, passage.losses, strict=False):
        panel = {
            "text": text,
            "cases": [show_case(case) for case in cause.cases],
            "before": words.format_probability(losses[0]),
            "after": words.format_probability(losses[1]),
            "change": words.describe_change(*losses),
            "bars": [_bar_length(loss) for loss in losses],
        }
        tokens.append(ShownToken(text, css_classes(text, colour(*losses)), panel))
    without, with_memory = (
        sum(losses[side] for losses in passage.losses) / len(passage.losses) for side in (0, 1)
    )
    change = words.NATS_CHANGE.format(with_memory - without)
    summary = (
        f"{words.NATS.format(without)} nats per token without the memory, "
        f"{words.NATS.format(with_memory)} with it ({change})."
    )
    return ShownPassage(passage.title, summary, tuple(tokens))


def css_classes(text: str, step: int) -> str:
    """Return the classes of a token whose colour is `step`, from -4 to 4."""
    names = ["t", *([f"{'up' if step > 0 else 'down'}-{abs(step)}"] if step else [])]
    if not text.strip() and "\n" in text:
        names.append("newline")
    return " ".join(names)


def colour(before: float, after: float) -> int:
    """Return the colour of a token by its losses: -4, much less likely, to 4, much likelier."""
    gain = before - after
    reached = sum(abs(gain) >= math.log(factor) for factor in FACTORS)
    return reached if gain > 0 else -reached


def _bar_length(loss: float) -> float:
    """Return the probability as a finite number, which is all that JSON takes."""
    value = math.exp(-loss)
    return round(value, 4) if math.isfinite(value) else 0.0


def show_case(case: RecalledCase) -> dict[str, Any]:
    """Return what the panel says of one layer; each expert has its Δlogit behind it."""
    return {
        "layer": case.layer,
        "before": case.before,
        "token": case.token,
        "after": case.after,
        "distance": words.PLAIN.format(case.distance),
        "confidence": words.PLAIN.format(case.confidence),
        "in": _experts(case.experts_in),
        "out": _experts(case.experts_out),
    }


def _experts(changes: Mapping[int, float]) -> list[str]:
    return [f"{expert} ({words.LOGITS.format(change)})" for expert, change in changes.items()]
