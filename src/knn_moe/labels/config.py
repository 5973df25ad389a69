"""How prompts are answered, and which answers are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from knn_moe.errors import ConfigError
from knn_moe.labels.agreement import Same, same_words

CONFIDENCE, AGREEMENT, JUDGE = "confidence", "agreement", "judge"
WAYS: Final = (CONFIDENCE, AGREEMENT, JUDGE)

_SHARE: Final = 0.5  # kept of all, by confidence, unless said otherwise
_LEAST: Final = 0.5  # score that is kept, by agreement and by a judge


@dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """What an answer is scored by, and which scores are kept.

    "confidence": the mean log-probability of the tokens of the likeliest answer. "agreement": the
    share of `samples` answers, drawn at `temperature`, that say the same as the one most often
    given, which is the label. "judge": what a judge says of the likeliest answer.
    """

    by: str = CONFIDENCE
    keep: float | None = None  # this share of the prompts, those of the highest scores
    threshold: float | None = None  # or all of at least this score
    samples: int = 8  # by agreement
    temperature: float = 0.7  # by agreement
    same: Same = same_words  # by agreement: whether two answers say the same
    max_new_tokens: int = 64
    stop: str | None = None  # an answer ends before this text
    batch_size: int = 16  # answers written at a time
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise ConfigError(f"Unknown way to label {self.by!r}. Available: {', '.join(WAYS)}.")
        if self.keep is not None and self.threshold is not None:
            raise ConfigError(
                f"Choose one of keep (a share, got {self.keep}) and threshold (a score, got "
                f"{self.threshold})."
            )
        if self.keep is None and self.threshold is None:
            name, value = ("keep", _SHARE) if self.by == CONFIDENCE else ("threshold", _LEAST)
            object.__setattr__(self, name, value)
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ConfigError(f"keep must be more than 0 and at most 1, got {self.keep}.")
        if self.threshold is not None and math.isnan(self.threshold):
            raise ConfigError("threshold must be a number, got nan.")
        least: dict[str, Any] = {"samples": 2 if self.by == AGREEMENT else 1}
        for name in ("samples", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least.get(name, 1):
                raise ConfigError(f"{name} must be at least {least.get(name, 1)}, got {value}.")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature must be positive, got {self.temperature}.")
        if self.stop is not None and not self.stop:
            raise ConfigError("stop must be a text, got an empty one: leave it out.")

    @property
    def drawn(self) -> int:
        """Answers to each prompt."""
        return self.samples if self.by == AGREEMENT else 1
