"""Numbers in words, the colours of tokens, and pages on disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from knn_moe.explain.reader import colour
from knn_moe.pages import words
from knn_moe.pages.page import write_page

SPACE = "\N{NARROW NO-BREAK SPACE}"


def test_numbers_are_said_plainly() -> None:
    assert words.format_p(0.0) == "p\xa0<\xa00.001"
    assert words.format_p(0.0314) == "p\xa0=\xa00.031"
    assert words.NATS_CHANGE.format(-0.0001) == "0.000"
    assert words.SHARE.format(None) == "–"
    assert words.format_perplexity(10.0) == "22,026.47"
    assert words.format_perplexity(600.0) == "3.8e+260"
    assert words.format_perplexity(1e4) == "infinite"
    assert words.format_perplexity(math.nan) == "not a number"
    assert words.format_probability(0.0) == f"> 99.9{SPACE}%"
    assert words.format_probability(math.log(9)) == f"11{SPACE}%"
    assert words.format_probability(50.0) == f"< 0.001{SPACE}%"
    assert words.describe_change(2.0, 1.0) == "2.7 times likelier"
    assert words.describe_change(1.0, 20.0) == "over 1,000 times less likely"
    assert words.describe_change(1.0, 1.01) == "about as likely as before"


@pytest.mark.parametrize(
    ("factor", "step"), [(1.09, 0), (1.11, 1), (1.6, 2), (2.1, 3), (40.0, 4), (1 / 1.6, -2)]
)
def test_a_token_is_coloured_by_the_change_of_its_probability(factor: float, step: int) -> None:
    assert colour(3.0, 3.0 - math.log(factor)) == step


def test_a_page_replaces_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    write_page("half of a character: \ud83d", target)
    assert target.read_text(encoding="utf8") == "half of a character: &#55357;"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_leaves_the_page_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError("no space")

    target = tmp_path / "report.html"
    target.write_text("old")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_page("new", target)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert target.read_text() == "old"
