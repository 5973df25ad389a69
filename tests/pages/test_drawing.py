"""The plumbing of charts: what a page draws with them fits, follows the scheme and the width."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jinja2 import DictLoader

from helpers.browser import (
    SCHEMES,
    WIDTHS,
    assert_everything_fits,
    assert_labels_are_apart,
    look_at,
)
from helpers.html_page import assert_self_contained
from knn_moe.pages import page as pages
from knn_moe.pages.page import render, write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHART = """
{% extends "base.html.j2" %}
{% block title %}a chart{% endblock %}
{% block styles %}{% include "charts.css" %}{% endblock %}
{% block libraries %}{% include "plot.html.j2" %}{% endblock %}
{% block main %}<div class="chart" id="box"></div>{% endblock %}
{% block scripts %}
const names = ["a long name of a method", "short"];
charts.draw(document.getElementById("box"), (width) => Plot.plot({
  width, marginLeft: MARGIN, y: { label: null }, x: { label: null },
  marks: [Plot.barX([60, -60], { x: Number, y: names, fill: charts.colour("--up") })],
}));
{% endblock %}
"""


@pytest.fixture
def make_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a page with one chart, whose left margin is an expression of JavaScript."""

    def make(margin: str) -> Path:
        sources = DictLoader({"chart": CHART.replace("MARGIN", margin)})
        read = pages._read_template
        monkeypatch.setattr(
            pages, "_read_template", lambda name: sources.mapping.get(name) or read(name)
        )
        page = render("chart", {})
        assert_self_contained(page)
        write_page(page, tmp_path / "chart.html")
        return tmp_path / "chart.html"

    return make


@pytest.mark.parametrize("width", WIDTHS)
def test_labels_have_room(chromium: Browser, make_chart: Any, width: int) -> None:
    with look_at(chromium, make_chart("charts.widest(names)"), width) as page:
        assert_everything_fits(page)
        assert_labels_are_apart(page)
        shown = page.locator("#box svg").bounding_box()
        assert shown is not None
        assert shown["width"] > width / 2


def test_a_clipped_label_is_noticed(chromium: Browser, make_chart: Any) -> None:
    with (
        look_at(chromium, make_chart("20")) as page,
        pytest.raises(AssertionError, match="a long name of a method"),
    ):
        assert_everything_fits(page)


def test_a_chart_follows_the_scheme_and_the_width(chromium: Browser, make_chart: Any) -> None:
    path = make_chart("charts.widest(names)")
    fill = "() => document.querySelector('#box svg g[aria-label=bar]').getAttribute('fill')"
    with look_at(chromium, path, 1400, SCHEMES[0]) as page:
        page.wait_for_selector("#box svg g[aria-label=bar]")
        light = page.evaluate(fill)
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"(light) => ({fill})() !== light", arg=light)
        page.set_viewport_size({"width": 600, "height": 800})
        page.wait_for_function("() => document.querySelector('#box svg').clientWidth < 600")


def test_errors_and_requests_are_noticed(chromium: Browser, tmp_path: Path) -> None:
    page_file = tmp_path / "page.html"
    for bad in ("<script>nothing()</script>", "<img src='http://localhost:1/x.png'>"):
        page_file.write_text(bad)
        with pytest.raises(AssertionError), look_at(chromium, page_file):
            pass
