"""How a memory is calibrated, as a frozen value that checks itself."""

from __future__ import annotations

from dataclasses import dataclass

from knn_moe.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """How a memory is calibrated."""

    neighbours: tuple[int, ...] = (8, 32)  # K to choose among
    value_rates: tuple[float, ...] = (0.05, 0.1)  # to learn values with; none: they stay
    passes: int = 2  # over the examples, while values are learned
    held_out: float = 0.15  # of the examples, to choose by, and as many to judge by
    fit_tokens: int = 262144  # read at most, to fit
    judge_tokens: int = 16384  # read at most, to choose by, and as many to judge by
    # Of the widths' fit, at most; no more than two passes, and half for the next K.
    steps: int = 64
    step_tokens: int = 8192  # that a step reads, at most; less where that would be few steps
    head: bool = False  # whether it is also to tell the next token (head.py)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.neighbours or min(self.neighbours) < 1:
            raise ConfigError(f"neighbours must be numbers from 1 on, got {self.neighbours}.")
        if any(not 0 < rate < float("inf") for rate in self.value_rates):
            raise ConfigError(f"value_rates must be positive, got {self.value_rates}.")
        if not 0 < self.held_out < 0.5:
            raise ConfigError(f"held_out must be between 0 and 0.5, got {self.held_out}.")
        for name in ("passes", "fit_tokens", "judge_tokens", "steps", "step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
