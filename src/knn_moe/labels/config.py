"""How prompts are answered, and which answers are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from knn_moe.errors import ConfigError
from knn_moe.labels.agreement import Same, same_words
from knn_moe.support.registry import unknown_name

CONFIDENCE, AGREEMENT, JUDGE = "confidence", "agreement", "judge"
SCORES: Final = (CONFIDENCE, AGREEMENT, JUDGE)

# What is kept by default. Confidences have no natural threshold: they depend on the model.
_DEFAULTS: Final = {
    CONFIDENCE: ("keep", 0.5),
    AGREEMENT: ("threshold", 0.5),
    JUDGE: ("threshold", 0.5),
}


@dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """How answers are generated and scored, and which of them are kept.

    An answer is scored `by`:

    - "confidence": the mean log-probability of the tokens of the greedy answer.
    - "agreement": of `samples` answers, sampled at `temperature`, the share that agree with the
      most frequent one, which becomes the label.
    - "judge": the verdict of a judge on the greedy answer.

    Raises:
        ConfigError: A value is out of range, or both `keep` and `threshold` are set.
    """

    by: str = CONFIDENCE
    keep: float | None = None  # the share of prompts to keep, those with the highest scores
    threshold: float | None = None  # or the lowest score to keep
    samples: int = 8  # by agreement
    temperature: float = 0.7  # by agreement
    same: Same = same_words  # by agreement: whether two answers agree
    max_new_tokens: int = 64
    stop: str | None = None  # an answer ends before this text
    batch_size: int = 16  # answers generated at a time
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in SCORES:
            raise ConfigError(unknown_name("way to label", self.by, SCORES))
        if self.keep is not None and self.threshold is not None:
            raise ConfigError(
                f"Choose one of keep (a share, got {self.keep}) and threshold (a score, got "
                f"{self.threshold})."
            )
        if self.keep is None and self.threshold is None:
            name, value = _DEFAULTS[self.by]
            object.__setattr__(self, name, value)
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ConfigError(f"keep must be more than 0 and at most 1, got {self.keep}.")
        if self.threshold is not None and math.isnan(self.threshold):
            raise ConfigError("threshold must be a number, got nan.")
        least = {"samples": 2 if self.by == AGREEMENT else 1, "max_new_tokens": 1, "batch_size": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:
                raise ConfigError(f"{name} must be at least {minimum}, got {value}.")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature must be positive, got {self.temperature}.")
        if self.stop is not None and not self.stop:
            raise ConfigError("stop must not be empty. Leave it out, or use None.")

    @property
    def answers_per_prompt(self) -> int:
        """How many answers are generated for each prompt."""
        return self.samples if self.by == AGREEMENT else 1
