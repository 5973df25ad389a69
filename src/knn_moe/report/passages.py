"""Texts that a report shows token by token. How they look is explain/reader.py's."""

from __future__ import annotations

from dataclasses import dataclass

from knn_moe.explain.explanation import ExplainedToken


@dataclass(frozen=True)
class Passage:
    """A text that a model read with a memory attached."""

    title: str
    tokens: tuple[ExplainedToken, ...]

    @property
    def losses(self) -> list[tuple[float, float]]:
        """The loss of every token but the first, without the memory and with it."""
        return [token.following.losses for token in self.tokens if token.following is not None]

    @property
    def gain(self) -> float:
        """Nats by which the memory raised the log-likelihood of the passage."""
        return sum(without - with_memory for without, with_memory in self.losses)
