"""One question and its answer, as a run stores them."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, Final

from knn_moe.reference.quiz import LETTERS

NEAR_TIE: Final = 1e-3  # nats: rounding, such as by another batch size, may flip such a choice


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The result of one question.

    `margin`: how far the best choice is ahead of the second, in nats per character.
    """

    id: str
    prompt: str  # its hash
    score: float  # 0 to 1
    batch: int
    nll: float | None = None  # mean loss of the prompt's tokens, or of a text's
    answer: str | None = None
    parsed: str | None = None
    output: str | None = None
    choices: int | None = None  # how many there were, if an answer of one of them was generated
    likelihoods: tuple[float, ...] | None = None  # log-likelihoods of the choices
    plain_score: float | None = None  # by likelihood, not normalised by length
    margin: float | None = None

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and self.margin < NEAR_TIE

    @property
    def chance(self) -> float | None:
        """Return the probability of guessing right; None without choices, or if it is not known."""
        count = self.choices or len(self.likelihoods or ())
        return 1 / count if count else None

    @property
    def answer_loss(self) -> float | None:
        """Return -log p(the right choice | the prompt) in nats, if scored by likelihood."""
        if self.likelihoods is None or self.answer is None:
            return None
        return -self.likelihoods[LETTERS.index(self.answer)]

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Sample:
        likelihoods = row.get("likelihoods")
        return cls(**{**row, "likelihoods": tuple(likelihoods) if likelihoods else None})


@dataclass(frozen=True)
class Asked:
    """What the question with this id asks: the prompt, and the choices if they are compared."""

    id: str
    prompt: str
    choices: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Asked:
        return cls(str(row["id"]), str(row.get("prompt", "")), tuple(row.get("choices", ())))


def short_hash(text: str) -> str:
    """Return 16 hex digits that identify `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
