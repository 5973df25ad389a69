"""How the report says numbers, and what they amount to in a sentence.

Knows units, signs and when a change counts; nothing of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from knn_moe.demo.result import Score
from knn_moe.support.statistics import Comparison

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

    def say(self, value: float, digits: int | None = None) -> str:
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
SECONDS: Final = Unit(digits=1, suffix="s")


def perplexity(value: float) -> str:
    return f"{value:.1e}" if 1e7 <= value < math.inf else PLAIN.say(value)


def probability(nll: float) -> str:
    value = math.exp(-nll)
    if 0 <= value < 1e-5:
        return f"< {SHARE.say(1e-5, 3)}"
    if value >= 0.9995:
        return f"> {SHARE.say(0.999)}"
    return SHARE.say(value, 3 if value < 1e-3 else 1 if value < 0.1 else 0)


def likelier(before: float, after: float) -> str:
    """How the probability of a token changed, from its nats before and after."""
    gain = before - after
    if math.isnan(gain):
        return "not comparable"
    factor = math.exp(min(abs(gain), 700))
    if factor < 1.05:
        return "about as likely as before"
    times = "over 1,000" if factor > 1000 else f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"
    return f"{times} times {'likelier' if gain > 0 else 'less likely'}"


def p_value(p: float) -> str:
    said = "< 0.001" if p < 0.001 else f"= {NATS.say(p)}"
    return f"p {said}".replace(" ", _FIXED_SPACE)


def interval(change: Comparison, unit: Unit) -> str:
    """From low to high, the unit said once."""
    return f"{unit.say(change.low).removesuffix(unit.ending)} to {unit.say(change.high)}"


def verdict(change: Comparison, lower_is_better: bool) -> str:
    """What a reader may conclude: "better", "worse" or "no clear change"."""
    if not change.significant or not change.difference:
        return "no clear change"
    return "better" if (change.difference < 0) == lower_is_better else "worse"


def average(values: Sequence[float], unit: Unit) -> str:
    """The mean, or a dash where there is nothing to average."""
    return unit.say(sum(values) / len(values)) if values else "–"


def size(count: int) -> str:
    value, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB"):
        if value >= 1000:
            value, unit = value / 1000, larger
    return f"{Unit(0 if unit == 'bytes' else 1).say(value)} {unit}"


def headline(scores: Sequence[Score]) -> str:
    """The result in a sentence or two: the last true memory, then the controls."""
    if not scores:
        return "Nothing was measured."
    compared = [score for score in scores if score.nll_change is not None]
    true = [score for score in compared if not score.control]
    alone = perplexity(scores[0].perplexity)
    if not true:
        return f"The model alone has perplexity {alone}; no memory was compared with it."
    said = f"With {true[-1].way}, perplexity {_moves(true[-1], f'from {alone} to')}."
    for control in (score for score in compared if score.control):
        said += f" With a control, a memory that should not help, it {_moves(control, 'to')}."
    return said


def _moves(score: Score, way: str) -> str:
    change = score.nll_change
    reached = f"{way} {perplexity(score.perplexity)}"
    if change is None or not change.significant or not change.difference:
        chance = f" ({p_value(change.p)})" if change else ""
        return f"goes {reached}, which this test cannot tell from chance{chance}"
    return f"{'falls' if change.difference < 0 else 'rises'} {reached} ({p_value(change.p)})"
