"""A passage as the page shows it: each token's colour, and what its panel says.

Knows which change of likelihood is worth a colour; nothing of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from knn_moe.demo.result import Passage, PassageToken
from knn_moe.explain.explanation import RecalledCase
from knn_moe.report import words

# A token takes the next colour when it became this many times likelier, or less likely.
FACTORS: Final = (1.1, 1.5, 2.0, 4.0)


@dataclass(frozen=True)
class ShownToken:
    text: str
    classes: str  # for the style sheet
    panel: dict[str, Any]  # JSON: what the panel says, already in words


@dataclass(frozen=True)
class ShownPassage:
    title: str
    summary: str
    tokens: tuple[ShownToken, ...]

    @property
    def panels(self) -> list[dict[str, Any]]:
        return [token.panel for token in self.tokens]


def show_passage(passage: Passage) -> ShownPassage:
    tokens = tuple(show_token(token) for token in passage.tokens)
    return ShownPassage(passage.title, _summary(passage), tokens)


def show_token(token: PassageToken) -> ShownToken:
    panel: dict[str, Any] = {"text": token.text, "cases": [show_case(case) for case in token.cases]}
    step = 0
    if token.nll_before is not None and token.nll_after is not None:
        step = level(token.nll_before, token.nll_after)
        panel |= {
            "before": words.probability(token.nll_before),
            "after": words.probability(token.nll_after),
            "change": words.likelier(token.nll_before, token.nll_after),
            "bars": [_share(token.nll_before), _share(token.nll_after)],
        }
    return ShownToken(token.text, classes(token.text, step), panel)


def classes(text: str, step: int) -> str:
    """Of a token, by its colour: from -4 to 4."""
    names = ["t", *([f"{'up' if step > 0 else 'down'}-{abs(step)}"] if step else [])]
    if not text.strip() and "\n" in text:
        names.append("newline")
    return " ".join(names)


def level(before: float, after: float) -> int:
    """From -4, much less likely, to 4, much likelier."""
    gain = before - after
    reached = sum(abs(gain) >= math.log(factor) for factor in FACTORS)
    return reached if gain > 0 else -reached


def _share(nll: float) -> float:
    """The probability, for the length of a bar: JSON has no word for what is not a number."""
    value = math.exp(-nll)
    return round(value, 4) if math.isfinite(value) else 0.0


def show_case(case: RecalledCase) -> dict[str, Any]:
    """What the panel says of a layer; each expert with its Δlogit."""
    return {
        "layer": case.layer,
        "before": case.before,
        "token": case.token,
        "after": case.after,
        "distance": words.PLAIN.say(case.distance),
        "confidence": words.PLAIN.say(case.confidence),
        "in": _experts(case.experts_in),
        "out": _experts(case.experts_out),
    }


def _experts(changes: Mapping[int, float]) -> list[str]:
    return [f"{expert} ({words.LOGITS.say(change)})" for expert, change in changes.items()]


def _summary(passage: Passage) -> str:
    pairs = [
        (token.nll_before, token.nll_after)
        for token in passage.tokens
        if token.nll_before is not None and token.nll_after is not None
    ]
    if not pairs:
        return "No token of this passage was predicted."
    before, after = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    return (
        f"Nats per token: {words.NATS.say(before)} alone, {words.NATS.say(after)} with the memory, "
        f"a change of {words.NATS_CHANGE.say(after - before)} over {len(pairs)} tokens."
    )
