"""What a notebook shows of an explanation: valid, safe, readable in light and dark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.browser import SCHEMES, assert_everything_fits, look_at
from helpers.explained import make_prediction, make_token
from helpers.html_page import Page, assert_self_contained
from knn_moe.explain.explanation import ExplainedToken, Explanation

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def followed(text: str, following: str, alone: float, with_memory: float) -> ExplainedToken:
    """Return a token, and what came next with these probabilities."""
    came = make_prediction(following, alone, with_memory)
    return replace(make_token(text, 2), following=came)


def test_it_shows_the_text_and_what_changed_most() -> None:
    tokens = (followed("don", "’t", 0.1, 0.9), followed("’t", " go", 0.5, 0.2), make_token(" go"))
    html = Explanation((0, 1), (tokens,), "tiny-olmoe", "a memory")._repr_html_()
    assert_self_contained(html)
    page = Page(html)
    assert "don’t go" in page.text
    assert page.scripts == []
    titles = [attrs["title"] for tag, attrs in page.tags if tag == "span"]
    assert titles == [
        "10\N{NARROW NO-BREAK SPACE}% alone, 90\N{NARROW NO-BREAK SPACE}% with the memory",
        "50\N{NARROW NO-BREAK SPACE}% alone, 20\N{NARROW NO-BREAK SPACE}% with the memory",
    ]
    assert page.text.index("|’t|") < page.text.index("| go|")
    assert "…the old[ man] and" in page.text
    assert "tiny-olmoe with a memory, attached to 2 layers" in page.text


def test_strange_texts_and_numbers_are_safe() -> None:
    bad = "</div><script>alert(1)</script>\x1b[31m\ud800"
    token = followed(bad, bad, float("nan"), 0.5)
    token = replace(token, effects=make_token("", 1, before=bad).effects)
    html = Explanation((0,), ((token, followed(bad, bad, 0.0, 1.0)), ()), bad, bad)._repr_html_()
    page = Page(html)
    assert page.open == []
    assert page.scripts == []
    assert "\x1b" not in html
    html.encode("utf8")


def test_a_long_text_is_shortened() -> None:
    html = Explanation((0,), ((make_token("word ", 1),) * 900,))._repr_html_()
    assert "The last 400 of 900 tokens" in html
    assert len(html) < 20_000
    assert Explanation((), ())._repr_html_()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_fits_a_narrow_cell(scheme: str, chromium: Browser, tmp_path: Path) -> None:
    tokens = tuple(followed(" several", " words", 0.1 * number, 0.5) for number in range(9))
    html = Explanation((0, 1), (tokens,))._repr_html_()
    (tmp_path / "cell.html").write_text(f"<meta charset=utf8>{html}", encoding="utf8")
    with look_at(chromium, tmp_path / "cell.html", 390, scheme) as page:
        assert_everything_fits(page)
        assert page.locator("span").first.evaluate("e => getComputedStyle(e).backgroundColor")
