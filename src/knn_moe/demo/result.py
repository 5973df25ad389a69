"""What a demo found, as plain values: ready for a table, for JSON and for the report.

Knows numbers and text; nothing of models or tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from knn_moe.explain.explanation import RecalledCase
from knn_moe.support.statistics import Comparison


@dataclass(frozen=True)
class Score:
    """One way of running the model on the test text; the changes are against zero-shot."""

    way: str
    nll: float  # nats per token
    accuracy: float  # share of next tokens guessed right
    choice: float  # share of true continuations told from three others
    nll_change: Comparison | None = None
    accuracy_change: Comparison | None = None
    choice_change: Comparison | None = None
    confidence: tuple[float, ...] = ()  # mean λ, per layer
    rerouted: tuple[float, ...] = ()  # share of tokens whose experts changed, per layer
    control: bool = False  # a memory that should not help

    @property
    def perplexity(self) -> float:
        return math.inf if self.nll >= 700 else math.exp(self.nll)


@dataclass(frozen=True)
class ExpertUse:
    """The share of tokens each expert was chosen for. Shapes: layers × experts, rows sum to
    top-k."""

    before: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Tercile:
    """A third of the test windows, by how well the model alone predicts them."""

    name: str  # "easiest third", "middle third", "hardest third"
    perplexity: tuple[float, float]  # of the model alone: lowest and highest window
    nll: dict[str, float]  # by way, in the order of the scores
    change: dict[str, Comparison]  # by way, against zero-shot


@dataclass(frozen=True)
class PassageToken:
    """A token of a test passage: how likely it was without and with the memory, and what the
    routers recalled at the token before, which predicts it."""

    text: str
    nll_before: float | None  # None: the first token, which nothing predicts
    nll_after: float | None
    cases: tuple[RecalledCase, ...]


@dataclass(frozen=True)
class Passage:
    title: str
    tokens: tuple[PassageToken, ...]

    @property
    def gain(self) -> float:
        """Nats by which the memory made the whole passage likelier."""
        return sum((t.nll_before or 0.0) - (t.nll_after or 0.0) for t in self.tokens)


@dataclass(frozen=True)
class MemoryFacts:
    """A memory the demo built."""

    way: str
    settings: str  # in words, such as "S = 1, η = 0.02, K = 1"
    folder: str
    cases: int  # in each layer
    bytes: int
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    model: str
    reference: str  # where the reference text comes from, in words
    reference_tokens: int
    test: str
    layers: tuple[int, ...]
    top_k: int
    test_tokens: int
    test_windows: int
    choices: int  # how many four-way choices
    memories: tuple[MemoryFacts, ...]
    scores: tuple[Score, ...]
    experts: ExpertUse  # without and with the strong memory
    terciles: tuple[Tercile, ...]
    passages: tuple[Passage, ...]
