"""Charts as inline SVG: numbers in, a string out.

Knows geometry and class names; colours are the style sheet's, so one chart serves light, dark
and print.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from knn_moe.report.words import Unit

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
_LEAST: Final = {"bars": 0.64, "map": 0.8}  # of its size, on a narrow screen


@dataclass(frozen=True)
class Series:
    """One way's bars, one per category; `style` picks its look in the style sheet."""

    name: str
    style: int
    values: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...] = ()  # low and high of each value, or none at all

    def reach(self, category: int) -> tuple[float, float]:
        """From where to where a value's whisker goes; the value itself where it has none."""
        value = self.values[category]
        low, high = self.intervals[category] if self.intervals else (value, value)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else (value, value)


@dataclass(frozen=True)
class _Plot:
    """Where values and categories lie on a bar chart."""

    width: float
    ticks: list[float]
    groups: int
    series: int

    @property
    def group(self) -> float:
        return (self.width - _LEFT - _RIGHT) / max(self.groups, 1)

    @property
    def bar(self) -> float:
        return min(self.group * 0.84 / max(self.series, 1), _WIDEST_BAR)

    def left(self, group: int, series: int) -> float:
        return _LEFT + self.group * (group + 0.5) + self.bar * (series - self.series / 2)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        bottom = _BOTTOM + (_BELOW if low < 0 else 0.0)
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - bottom)


def grouped_bars(
    label: str,
    categories: Sequence[str],
    series: Sequence[Series],
    unit: Unit,
    width: float = 500.0,  # at least
) -> str:
    """Bars from zero, up or down, a group per category; a value that is not finite has no bar."""
    values = [
        end
        for one in series
        for category, value in enumerate(one.values)
        if math.isfinite(value)
        for end in (value, *one.reach(category))
    ]
    bars = len(categories) * len(series)
    width = max(width, _LEFT + _RIGHT + bars * _NARROWEST_BAR / 0.84)
    plot = _Plot(width, ticks(values), len(categories), len(series))
    parts = [*_axis(plot, unit), *_names(plot, categories)]
    for number, one in enumerate(series):
        for group, (category, value) in enumerate(zip(categories, one.values, strict=True)):
            if math.isfinite(value):
                x, reach = plot.left(group, number), one.reach(group)
                what = f"{category}, {one.name}: {unit.say(value, unit.digits + 1)}"
                parts += _bar(plot, x, value, one.style, what)
                parts += _whisker(plot, x, reach)
                parts += _value(plot, x, value, reach, unit)
    parts.append(_line("zero", plot, plot.y(0.0)))
    return _svg("bars", label, (width, _HEIGHT), parts)


def ticks(values: Sequence[float]) -> list[float]:
    """Round numbers that hold zero and every value, about five of them."""
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    if low == high:
        return [0.0, 1.0]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(round(low / step, 6)), math.ceil(round(high / step, 6))
    return [number * step for number in range(first, last + 1)]


def heat_map(
    label: str,
    rows: Sequence[Sequence[float]],
    layers: Sequence[int],
    limit: float,
    unit: Unit,
) -> str:
    """A cell per layer and expert; the fuller the colour, the closer to `limit`.

    A signed unit makes it diverging: cells above zero, below zero, and a sign on the strong ones.
    """
    experts = max((len(row) for row in rows), default=0)
    cell = min(max(736.0 / max(experts, 1), 7.5), 17.0)
    left, top = 36.0, 18.0
    width, height = left + experts * cell + 2, top + len(rows) * cell + 32
    back = f'width="{experts * cell:.2f}" height="{len(rows) * cell:.2f}"'
    parts = [
        f'<rect class="back" x="{left}" y="{top}" {back}/>',
        _text("axis", left - 6, 10, "layer", "end"),
    ]
    for row, (layer, values) in enumerate(zip(layers, rows, strict=True)):
        y = top + row * cell
        if row % math.ceil(14 / cell) == 0:
            parts.append(_text("axis", left - 6, y + cell / 2 + 4, str(layer), "end"))
        for expert, value in enumerate(values):
            what = f"layer {layer}, expert {expert}: {unit.say(value)}"
            parts.append(_cell(left + expert * cell, y, cell, _strength(value, limit), what))
            if unit.signed and cell > 14 and abs(_strength(value, limit)) >= 0.25:
                sign = "+" if value > 0 else "−"
                parts.append(_text("sign", left + (expert + 0.5) * cell, y + cell / 2 + 4, sign))
    every = 4 if cell > 14 else 8
    for expert in range(0, experts, every):
        parts.append(_text("axis", left + (expert + 0.5) * cell, height - 19, str(expert)))
    parts.append(_text("axis", left + experts * cell / 2, height - 4, "expert"))
    return _svg("map", label, (width, height), parts)


def _strength(value: float, limit: float) -> float:
    """The value as a share of the limit, from -1 to 1; 0 where it cannot be said."""
    if not math.isfinite(value) or limit <= 0:
        return 0.0
    return max(-1.0, min(1.0, value / limit))


def _cell(x: float, y: float, size: float, strength: float, what: str) -> str:
    side = "down" if strength < 0 else "up"
    return (
        f'<rect class="cell {side}" x="{x:.2f}" y="{y:.2f}" width="{size:.2f}" '
        f'height="{size:.2f}" fill-opacity="{abs(strength):.3f}">'
        f"<title>{escape(what)}</title></rect>"
    )


def _bar(plot: _Plot, x: float, value: float, style: int, what: str) -> Iterator[str]:
    top, bottom = sorted((plot.y(value), plot.y(0.0)))
    gap = min(2.0, plot.bar / 4)
    yield (
        f'<rect class="bar way-{style}" x="{x + gap / 2:.2f}" y="{top:.2f}" '
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
    said = unit.say(value)
    if len(said) * _DIGIT <= plot.bar + 1:
        y = plot.y(min(reach)) + 13 if value < 0 else plot.y(max(reach)) - 5
        yield _text("value", x + plot.bar / 2, y, said)


def _axis(plot: _Plot, unit: Unit) -> Iterator[str]:
    step = plot.ticks[1] - plot.ticks[0]
    digits = max(0, -math.floor(math.log10(step * unit.scale) + 1e-9))
    for tick in plot.ticks:
        yield _line("grid", plot, plot.y(tick))
        yield _text("axis", _LEFT - 7, plot.y(tick) + 4, unit.say(tick, digits), "end")


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


def _svg(kind: str, label: str, size: tuple[float, float], parts: Sequence[str]) -> str:
    """Shrinks with its column as far as letters stay legible; from there its box scrolls."""
    width, height = size
    least = width * _LEAST[kind]
    return (
        f'<svg class="{kind}" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="width:{width:.0f}px;min-width:{least:.0f}px">{"".join(parts)}</svg>'
    )
