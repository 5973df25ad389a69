"""The report's charts: every bar and whisker is as long as its value says, and in its place."""

from __future__ import annotations

import math
import re

import pytest

from knn_moe.pages import words
from knn_moe.report.charts import Bars, grouped_bars, ticks


def bars_of(svg: str) -> list[dict[str, float]]:
    found = re.findall(r'<rect class="bar [^>]*>', svg)
    return [
        {key: float(value) for key, value in re.findall(r' (x|y|width|height)="(.*?)"', bar)}
        for bar in found
    ]


def test_bars_are_as_tall_as_their_values() -> None:
    bars = (Bars("a", 0, (0.2, -0.1)), Bars("b", 1, (0.4, math.nan)))
    svg = grouped_bars("label", ("one", "two"), bars, words.PLAIN)
    first, second, third = bars_of(svg)
    assert third["height"] == pytest.approx(2 * first["height"], abs=0.02)
    assert second["height"] == pytest.approx(first["height"] / 2, abs=0.02)
    assert first["y"] + first["height"] == pytest.approx(second["y"], abs=0.02)
    assert first["x"] < third["x"] < second["x"]
    assert "two, a: −0.100" in svg
    many = Bars("a", 0, tuple(0.5 for _ in range(128)))
    many_bars = bars_of(grouped_bars("", [str(i) for i in range(128)], (many,) * 4, words.PLAIN))
    assert len(many_bars) == 512
    assert min(bar["width"] for bar in many_bars) > 2


def test_whiskers_reach_from_low_to_high() -> None:
    reach = ((0.1, 0.4), (-0.3, 0.0), (math.nan, math.nan))
    one = Bars("a", 0, (0.2, -0.2, 0.1), reach)
    svg = grouped_bars("label", ("one", "two", "three"), (one,), words.PLAIN)
    up, down, _ = bars_of(svg)
    zero, nat = down["y"], up["height"] / 0.2
    lines = re.findall(r'class="whisker" d="[^"]*M([\d.]+) ([\d.]+)V([\d.]+)"', svg)
    assert len(lines) == 2
    assert not re.search(r"nan|inf", svg)
    for bar, (low, high), found in zip((up, down), reach, lines, strict=False):
        middle, *ends = map(float, found)
        assert middle == pytest.approx(bar["x"] + bar["width"] / 2, abs=0.02)
        assert ends == pytest.approx([zero - low * nat, zero - high * nat], abs=0.1)
    labels = re.findall(r'class="value" x="[\d.]+" y="([\d.]+)"', svg)
    assert float(labels[0]) < float(lines[0][2])
    assert float(labels[1]) > float(lines[1][1]) + 8


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], [0, 1]),
        ([0.0], [0, 1]),
        ([0.37], [0, 0.1, 0.2, 0.3, 0.4]),
        ([-0.2, 0.1], [-0.2, -0.1, 0, 0.1]),
    ],
)
def test_ticks_are_round(values: list[float], expected: list[float]) -> None:
    assert ticks(values) == pytest.approx(expected)
