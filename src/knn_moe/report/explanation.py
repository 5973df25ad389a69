"""The page of an explanation: the text as the model read it, each token with what was recalled.

Knows which λ is worth a colour; the words are in the template.
"""

from __future__ import annotations

from typing import Final

from knn_moe.explain.explanation import ExplainedToken, Explanation
from knn_moe.report import words
from knn_moe.report.page import render
from knn_moe.report.passages import ShownPassage, ShownToken, classes, show_case

# A token takes the next colour where its mean λ reaches this.
LEVELS: Final = (0.1, 0.3, 0.5, 0.7)


def render_explanation(explanation: Explanation, model: str, memory: str) -> str:
    """`model`, `memory`: their names."""
    context = {
        "model": model,
        "memory": memory,
        "layers": explanation.layers,
        "tokens": len(explanation.tokens),
        "passages": [
            _passage(f"Sequence {number}" if len(explanation.sequences) > 1 else "The text", tokens)
            for number, tokens in enumerate(explanation.sequences, start=1)
            if tokens
        ],
        "levels": LEVELS,
    }
    return render("explanation.html.j2", context)


def _passage(title: str, tokens: tuple[ExplainedToken, ...]) -> ShownPassage:
    confidence = words.average([token.confidence for token in tokens], words.PLAIN)
    changed = words.average([token.changed for token in tokens], words.SHARE)
    said = f"{len(tokens):,} tokens, mean λ {confidence}; experts changed in {changed} of layers."
    return ShownPassage(title, said, tuple(_token(token) for token in tokens))


def _token(token: ExplainedToken) -> ShownToken:
    swapped = sum(case.changed for case in token.cases)
    panel = {
        "text": token.text,
        "change": f"Mean λ {words.PLAIN.say(token.confidence)}; experts changed in {swapped} of "
        f"{len(token.cases)} layers.",
        "cases": [show_case(case) for case in token.cases],
    }
    step = sum(token.confidence >= level for level in LEVELS)
    return ShownToken(token.text, classes(token.text, step), panel)
