"""Texts to be read token by token: the colour of each token, and what its panel says.

Knows explanations and losses; nothing of HTML.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from knn_moe.explain.explanation import ExplainedToken
from knn_moe.explain.reader import ShownPassage, ShownToken, css_classes, show_case
from knn_moe.pages import words

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


def show_passage(passage: Passage) -> ShownPassage:
    """Colour each token by the change of its probability.

    A token's panel shows the cases recalled at the token before it, which predicts it.
    """
    first, *others = (token.text for token in passage.tokens)
    tokens = [ShownToken(first, css_classes(first, 0), {"text": first, "cases": []})]
    for text, cause, losses in zip(others, passage.tokens, passage.losses, strict=False):
        panel = {
            "text": text,
            "cases": [show_case(effect) for effect in cause.effects],
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


def colour(before: float, after: float) -> int:
    """Return the colour of a token by its losses: -4, much less likely, to 4, much likelier."""
    gain = before - after
    reached = sum(abs(gain) >= math.log(factor) for factor in FACTORS)
    return reached if gain > 0 else -reached


def _bar_length(loss: float) -> float:
    """Return the probability as a finite number, which is all that JSON takes."""
    value = math.exp(-loss)
    return round(value, 4) if math.isfinite(value) else 0.0
