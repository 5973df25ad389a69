"""Make explanations without a model."""

from __future__ import annotations

from typing import Any

from knn_moe.explain.explanation import ExplainedToken, LayerEffect, Prediction, RecalledCase

_CASE = ("before", "token", "after", "distance", "weight", "row", "example", "squared_distance")


def make_token(text: str, layers: int = 2, **facts: Any) -> ExplainedToken:
    """Make a token with one case for each layer; `facts` replace the usual ones."""
    return ExplainedToken(5, text, tuple(make_effect(layer, **facts) for layer in range(layers)))


def make_effect(layer: int, **facts: Any) -> LayerEffect:
    """Make what a layer did, with one case; `facts` replace the usual ones."""
    usual: dict[str, Any] = {
        **{"before": "the old", "token": " man", "after": " and", "distance": 0.5},
        **{"weight": 1.0, "row": 4, "example": 0, "squared_distance": 2.0},
    }
    effect: dict[str, Any] = {
        **{"confidence": 0.25, "experts": (5, 7), "experts_alone": (3, 5)},
        **{"experts_in": {7: 0.5}, "experts_out": {3: -1.25}},
    }
    case = RecalledCase(**{name: facts.get(name, usual[name]) for name in _CASE})
    own = {name: value for name, value in facts.items() if name not in _CASE}
    return LayerEffect(**{"layer": layer, "cases": (case,), **effect, **own})


def make_prediction(text: str, alone: float, with_memory: float) -> Prediction:
    """Make a next token."""
    return Prediction(6, text, alone, with_memory)
