"""Make explanations without a model."""

from __future__ import annotations

from typing import Any

from knn_moe.explain.explanation import ExplainedToken, RecalledCase


def make_token(text: str, layers: int = 2, **facts: Any) -> ExplainedToken:
    """Make a token with one case for each layer; `facts` replace the usual ones."""
    usual: dict[str, Any] = {
        **{"before": "the old", "token": " man", "after": " and", "distance": 0.5},
        **{"confidence": 0.25, "experts_in": {7: 0.5}, "experts_out": {3: -1.25}},
        **{"weight": 1.0, "row": 4, "example": 0, "squared_distance": 2.0},
    }
    return ExplainedToken(
        5, text, tuple(RecalledCase(layer=layer, **{**usual, **facts}) for layer in range(layers))
    )
