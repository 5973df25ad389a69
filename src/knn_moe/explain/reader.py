"""Texts to be read token by token on a page: a token's look, and what its panel says of each layer.

Knows explanations; nothing of HTML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knn_moe.explain.explanation import LayerEffect
from knn_moe.pages import words


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


def css_classes(text: str, step: int) -> str:
    """Return the classes of a token whose colour is `step`, from -4 to 4."""
    names = ["t", *([f"{'up' if step > 0 else 'down'}-{abs(step)}"] if step else [])]
    if not text.strip() and "\n" in text:
        names.append("newline")
    return " ".join(names)


def show_case(effect: LayerEffect) -> dict[str, Any]:
    """Return what the panel says of one layer; each expert has its Δlogit behind it."""
    nearest = effect.cases[0] if effect.cases else None
    return {
        "layer": effect.layer,
        "before": nearest.before if nearest else "",
        "token": nearest.token if nearest else "",
        "after": nearest.after if nearest else "",
        "distance": words.PLAIN.format(nearest.distance if nearest else None),
        "confidence": words.PLAIN.format(effect.confidence),
        "in": _experts(effect.experts_in),
        "out": _experts(effect.experts_out),
    }


def _experts(changes: Mapping[int, float]) -> list[str]:
    return [f"{expert} ({words.LOGITS.format(change)})" for expert, change in changes.items()]
