"""One question put and answered: what is written down of it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, Final

from knn_moe.tasks.prompts import LETTERS

NEAR_TIE: Final = 1e-3  # nats: rounding, as by another batch size, may turn a choice this close


@dataclass(frozen=True, kw_only=True)
class Sample:
    """`score` is what it is worth, 0 to 1; `nll` the mean loss of the prompt's tokens, or of a
    text's own. By likelihood, `likelihoods` are the choices', and `margin` how far the best is
    ahead, per character where lengths are evened out."""

    id: str
    prompt: str  # a hash of it
    score: float
    batch: int
    nll: float | None = None
    answer: str | None = None
    parsed: str | None = None
    output: str | None = None
    likelihoods: tuple[float, ...] | None = None
    plain_score: float | None = None  # by likelihood: without evening out lengths
    margin: float | None = None

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and self.margin < NEAR_TIE

    @property
    def answer_loss(self) -> float | None:
        """By likelihood: -log p(the right choice | the prompt), in nats."""
        if self.likelihoods is None or self.answer is None:
            return None
        return -self.likelihoods[LETTERS.index(self.answer)]

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Sample:
        likelihoods = row.get("likelihoods")
        return cls(**{**row, "likelihoods": tuple(likelihoods) if likelihoods else None})


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
