"""Put numbers into words.

Knows units, signs and when a change is significant; nothing of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from knn_moe.support.statistics import Comparison

NONE: Final = "–"
_MINUS: Final = "\N{MINUS SIGN}"
_FIXED_SPACE: Final = "\N{NO-BREAK SPACE}"
_NARROW_SPACE: Final = "\N{NARROW NO-BREAK SPACE}"


@dataclass(frozen=True)
class Unit:
    """A way to print one kind of quantity."""

    digits: int
    scale: float = 1.0
    suffix: str = ""
    signed: bool = False

    def format(self, value: float | None, digits: int | None = None) -> str:
        """Return the value with its sign and unit, or a dash where there is none."""
        if value is None:
            return NONE
        if not math.isfinite(value):
            return "not a number" if math.isnan(value) else f"{_MINUS * (value < 0)}infinite"
        places = self.digits if digits is None else digits
        scaled = round(value * self.scale, places) + 0.0  # adding zero turns -0.0 into 0.0
        text = f"{scaled:{'+' if self.signed and scaled else ''},.{places}f}"
        return text.replace("-", _MINUS) + self.ending

    @property
    def ending(self) -> str:
        return f"{_NARROW_SPACE}{self.suffix}" if self.suffix else ""


PLAIN: Final = Unit(digits=2)
NATS: Final = Unit(digits=3)
NATS_CHANGE: Final = Unit(digits=3, signed=True)
LOGITS: Final = Unit(digits=2, signed=True)
SHARE: Final = Unit(digits=1, scale=100, suffix="%")
POINTS: Final = Unit(digits=1, scale=100, suffix="pts", signed=True)


def format_perplexity(loss: float | None) -> str:
    """Return e to the mean loss per token, or a dash where there is no loss."""
    value = perplexity(loss)
    return f"{value:.1e}" if value is not None and 1e7 <= value < math.inf else PLAIN.format(value)


def perplexity(loss: float | None) -> float | None:
    """Return e to the mean loss per token, infinity where that is too large a number."""
    if loss is None:
        return None
    return math.exp(loss) if loss < 700 else loss * math.inf


def format_probability(loss: float) -> str:
    """Return the probability of a token, given its loss in nats."""
    value = math.exp(-loss)
    if 0 <= value < 1e-5:
        return f"< {SHARE.format(1e-5, 3)}"
    if value >= 0.9995:
        return f"> {SHARE.format(0.999)}"
    return SHARE.format(value, 3 if value < 1e-3 else 1 if value < 0.1 else 0)


def describe_change(before: float, after: float) -> str:
    """Say how the probability of a token changed, given its losses before and after."""
    gain = before - after
    if math.isnan(gain):
        return "not comparable"
    factor = math.exp(min(abs(gain), 700))
    if factor < 1.05:
        return "about as likely as before"
    times = "over 1,000" if factor > 1000 else f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"
    return f"{times} times {'likelier' if gain > 0 else 'less likely'}"


def format_p(p: float) -> str:
    """Return "p < 0.001", or p with three digits."""
    shown = "< 0.001" if p < 0.001 else f"= {NATS.format(p)}"
    return f"p {shown}".replace(" ", _FIXED_SPACE)


def format_interval(low: float, high: float, unit: Unit) -> str:
    """Return "low to high", with the unit once."""
    return f"{unit.format(low).removesuffix(unit.ending)} to {unit.format(high)}"


def judge_change(change: Comparison, lower_is_better: bool) -> str:
    """Say what a reader may conclude: "better", "worse" or "no clear change".

    A change that is in doubt is "not judged".
    """
    if change.doubt is not None:
        return "not judged"
    if not change.significant or not change.difference:
        return "no clear change"
    return "better" if (change.difference < 0) == lower_is_better else "worse"


def format_mean(values: Sequence[float], unit: Unit) -> str:
    """Return the mean, or a dash where there is nothing to average."""
    return unit.format(sum(values) / len(values)) if values else NONE
