"""Draw bar charts as inline SVG: numbers in, a string out.

Knows geometry and class names. Colours belong to the style sheet, so that one chart serves light,
dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from knn_moe.pages.words import Unit

_LEFT: Final = 48.0
_RIGHT: Final = 4.0
_TOP: Final = 18.0
_BOTTOM: Final = 26.0
_BELOW: Final = 14.0  # the numbers under bars that go down
_HEIGHT: Final = 230.0
_LETTER: Final = 6.2  # the width of a letter on an axis
_DIGIT: Final = 5.4  # the width of a digit over a bar
_NARROWEST_BAR: Final = 4.0
_WIDEST_BAR: Final = 44.0
_LEAST: Final = 0.64  # of its size, on a narrow screen


@dataclass(frozen=True)
class Bars:
    """The bars of one method, one per category; `style` picks their look in the style sheet."""

    name: str
    style: int
    values: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...] = ()  # low and high of each value, or none at all

    def reach(self, category: int) -> tuple[float, float]:
        """Return the ends of a value's whisker; the value itself, twice, where it has none."""
        value = self.values[category]
        low, high = self.intervals[category] if self.intervals else (value, value)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else (value, value)


@dataclass(frozen=True)
class _Plot:
    """Where values and categories lie on a bar chart."""

    width: float
    ticks: list[float]
    groups: int
    methods: int

    @property
    def group(self) -> float:
        return (self.width - _LEFT - _RIGHT) / max(self.groups, 1)

    @property
    def bar(self) -> float:
        return min(self.group * 0.84 / max(self.methods, 1), _WIDEST_BAR)

    def left(self, group: int, method: int) -> float:
        return _LEFT + self.group * (group + 0.5) + self.bar * (method - self.methods / 2)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        bottom = _BOTTOM + (_BELOW if low < 0 else 0.0)
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - bottom)


def grouped_bars(
    label: str,
    categories: Sequence[str],
    bars: Sequence[Bars],
    unit: Unit,
    width: float = 500.0,
) -> str:
    """Draw a group of bars for each category, from zero up or down.

    A value that is not finite has no bar. `width` is the least the chart takes.
    """
    values = [
        end
        for one in bars
        for category, value in enumerate(one.values)
        if math.isfinite(value)
        for end in (value, *one.reach(category))
    ]
    count = len(categories) * len(bars)
    width = max(width, _LEFT + _RIGHT + count * _NARROWEST_BAR / 0.84)
    plot = _Plot(width, ticks(values), len(categories), len(bars))
    parts = [*_axis(plot, unit), *_names(plot, categories)]
    for number, one in enumerate(bars):
        for group, (category, value) in enumerate(zip(categories, one.values, strict=True)):
            if math.isfinite(value):
                x, reach = plot.left(group, number), one.reach(group)
                what = f"{category}, {one.name}: {unit.format(value, unit.digits + 1)}"
                parts += _bar(plot, x, value, one.style, what)
                parts += _whisker(plot, x, reach)
                parts += _value(plot, x, value, reach, unit)
    parts.append(_line("zero", plot, plot.y(0.0)))
    return _svg(label, width, parts)


def ticks(values: Sequence[float]) -> list[float]:
    """Return about five round numbers in order, which span zero and every value."""
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    if low == high:
        return [0.0, 1.0]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(round(low / step, 6)), math.ceil(round(high / step, 6))
    return [number * step for number in range(first, last + 1)]


def _bar(plot: _Plot, x: float, value: float, style: int, what: str) -> Iterator[str]:
    top, bottom = sorted((plot.y(value), plot.y(0.0)))
    gap = min(2.0, plot.bar / 4)
    yield (
        f'<rect class="bar method-{style % 8}" x="{x + gap / 2:.2f}" y="{top:.2f}" '
        f'width="{plot.bar - gap:.2f}" height="{bottom - top:.2f}">'
        f"<title>{escape(what)}</title></rect>"
    )


def _whisker(plot: _Plot, x: float, reach: tuple[float, float]) -> Iterator[str]:
    """A line with a cap at both ends, twice: the wider one below sets it off from its bar."""
    low, high = (plot.y(end) for end in reach)
    if low > high:
        middle, cap = x + plot.bar / 2, min(4.0, plot.bar / 4)
        across = f"h{2 * cap:.2f}"
        line = f"M{middle - cap:.2f} {low:.2f}{across}M{middle - cap:.2f} {high:.2f}{across}"
        line += f"M{middle:.2f} {low:.2f}V{high:.2f}"
        yield f'<path class="halo" d="{line}"/><path class="whisker" d="{line}"/>'


def _value(
    plot: _Plot, x: float, value: float, reach: tuple[float, float], unit: Unit
) -> Iterator[str]:
    """The number past the end of its bar and whisker, where bars are wide enough for that."""
    said = unit.format(value)
    if len(said) * _DIGIT <= plot.bar + 1:
        y = plot.y(min(reach)) + 13 if value < 0 else plot.y(max(reach)) - 5
        yield _text("value", x + plot.bar / 2, y, said)


def _axis(plot: _Plot, unit: Unit) -> Iterator[str]:
    step = plot.ticks[1] - plot.ticks[0]
    digits = max(0, -math.floor(math.log10(step * unit.scale) + 1e-9))
    for tick in plot.ticks:
        yield _line("grid", plot, plot.y(tick))
        yield _text("axis", _LEFT - 7, plot.y(tick) + 4, unit.format(tick, digits), "end")


def _names(plot: _Plot, categories: Sequence[str]) -> Iterator[str]:
    """The categories' names under their groups; every second or third where they would touch."""
    longest = max((len(category) for category in categories), default=0)
    every = max(1, math.ceil((longest * _LETTER + 4) / plot.group))
    for group, category in enumerate(categories):
        if group % every == 0:
            middle = _LEFT + plot.group * (group + 0.5)
            yield _text("axis", middle, _HEIGHT - 8, category.removeprefix("layer "))


def _line(kind: str, plot: _Plot, y: float) -> str:
    ends = f'x1="{_LEFT:.2f}" x2="{plot.width - _RIGHT:.2f}"'
    return f'<line class="{kind}" {ends} y1="{y:.2f}" y2="{y:.2f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _svg(label: str, width: float, parts: Sequence[str]) -> str:
    """Return the chart, which shrinks as far as letters stay legible; then its box scrolls."""
    return (
        f'<svg class="bars" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width:.0f} {_HEIGHT:.0f}" '
        f'style="width:{width:.0f}px;min-width:{width * _LEAST:.0f}px">{"".join(parts)}</svg>'
    )
