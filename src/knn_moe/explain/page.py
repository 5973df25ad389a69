"""The page of an explanation: the text as the model read it, each token with what was recalled.

Knows how much fits on a page; the words are in the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from knn_moe.explain.explanation import ExplainedToken, Explanation
from knn_moe.explain.reader import FACTORS, show_tokens
from knn_moe.pages.page import render

# Each takes about 15 bytes of the page. Of longer texts, the end is shown.
MOST_CASES: Final = 400_000


def render_explanation(explanation: Explanation, most_cases: int = MOST_CASES) -> str:
    """Return the page of `explanation`.

    Args:
        explanation: The explanation.
        most_cases: Leave out the beginning of texts that recalled more cases than this together.
    """
    budget = most_cases // max(len(explanation.sequences), 1)
    sequences = [_end(tokens, budget) for tokens in explanation.sequences]
    context = {
        "model": explanation.model,
        "memory": explanation.memory,
        "layers": explanation.layers,
        "predicts": any(map(_is_moved, explanation.tokens)),
        "tokens": len(explanation.tokens),
        "left_out": len(explanation.tokens) - sum(map(len, sequences)),
        "passages": [
            show_tokens(f"Text {number}" if len(sequences) > 1 else "The text", tokens)
            for number, tokens in enumerate(sequences, start=1)
            if tokens
        ],
        "factors": FACTORS,
    }
    return render("explanation.html.j2", context)


def _is_moved(token: ExplainedToken) -> bool:
    """Whether the memory changed what the model expects after the token: a head also does."""
    return any(one.alone != one.with_memory for one in token.predictions)


def _end(tokens: Sequence[ExplainedToken], budget: int) -> Sequence[ExplainedToken]:
    """Return the last tokens that recalled at most `budget` cases together, and one at least."""
    for place in range(len(tokens) - 1, -1, -1):
        budget -= sum(len(effect.cases) for effect in tokens[place].effects)
        if budget < 0:
            return tokens[min(place + 1, len(tokens) - 1) :]
    return tokens
