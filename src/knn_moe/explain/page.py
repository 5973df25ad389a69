"""The page of an explanation: the text as the model read it, each token with what was recalled.

Knows which λ takes which colour; the words are in the template.
"""

from __future__ import annotations

from typing import Final

from knn_moe.explain.explanation import ExplainedToken, Explanation
from knn_moe.explain.reader import ShownPassage, ShownToken, css_classes, show_case
from knn_moe.pages import words
from knn_moe.pages.page import render

# A token takes the next colour where its mean λ reaches this.
LEVELS: Final = (0.1, 0.3, 0.5, 0.7)


def render_explanation(explanation: Explanation) -> str:
    """Return the page of `explanation`."""
    context = {
        "model": explanation.model,
        "memory": explanation.memory,
        "layers": explanation.layers,
        "tokens": len(explanation.tokens),
        "passages": [
            _show(f"Sequence {number}" if len(explanation.sequences) > 1 else "The text", tokens)
            for number, tokens in enumerate(explanation.sequences, start=1)
            if tokens
        ],
        "levels": LEVELS,
    }
    return render("explanation.html.j2", context)


def _show(title: str, tokens: tuple[ExplainedToken, ...]) -> ShownPassage:
    confidence = words.format_mean([token.confidence for token in tokens], words.PLAIN)
    changed = words.format_mean([token.changed for token in tokens], words.SHARE)
    summary = (
        f"{len(tokens):,} tokens, mean λ {confidence}; the experts changed in {changed} of all "
        f"layers and tokens."
    )
    return ShownPassage(title, summary, tuple(_show_token(token) for token in tokens))


def _show_token(token: ExplainedToken) -> ShownToken:
    swapped = sum(effect.changed for effect in token.effects)
    panel = {
        "text": token.text,
        "change": f"Mean λ {words.PLAIN.format(token.confidence)}; experts changed in {swapped} of "
        f"{len(token.effects)} layers.",
        "cases": [show_case(effect) for effect in token.effects],
    }
    step = sum(token.confidence >= level for level in LEVELS)
    return ShownToken(token.text, css_classes(token.text, step), panel)
