"""Explanations as tables of text and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from helpers.explained import make_prediction, make_token
from knn_moe.errors import ConfigError
from knn_moe.explain.explanation import ExplainedToken, Explanation

MANY_EXPERTS = {number: -0.5 + number / 10 for number in range(100, 112)}


def expecting(token: ExplainedToken, alone: float, with_memory: float) -> ExplainedToken:
    """Return the token with a next token of these probabilities."""
    expected = make_prediction(" next", alone, with_memory)
    return replace(token, predictions=(expected,), following=expected)


def test_the_table() -> None:
    explanation = Explanation(
        (0, 1), ((make_token(" a"), make_token("b\n", experts_in={}, experts_out={})),)
    )
    lines = str(explanation).splitlines()
    assert lines[1].split() == ["|", "a|", "0.25", "2/2", "0", "…the", "old[", "man]", "and"]
    assert lines[2].startswith("|b⏎| ")
    assert "0/2" in lines[2]
    detail = explanation.table(layer=1).splitlines()
    assert detail[0].split() == ["token", "λ", "distance", "recalled", "experts", "(Δlogit)"]
    assert "0.25" in detail[1]
    assert "0.50" in detail[1]
    assert detail[1].endswith("in 7 (+0.50)  out 3 (-1.25)")
    assert detail[2].endswith("…the old[ man] and")
    assert repr(explanation).startswith("Explanation(2 tokens × 2 layers, mean λ 0.25)\n")
    long = Explanation((0, 1), ((make_token("a"),) * 30,))
    assert repr(long).endswith("… 10 more tokens: print it, or use its table()")
    assert len(repr(long).splitlines()) == 23
    assert len(str(long).splitlines()) == 31


def test_the_table_says_how_likely_the_next_token_is() -> None:
    likelier = expecting(make_token("a"), 0.016, 0.25)
    last = replace(expecting(make_token("b"), 0.5, 1.0), following=None)
    lines = str(Explanation((0, 1), ((likelier, last),))).splitlines()
    assert "next token" in lines[0]
    assert re.search(r"2/2 +1\.6% → 25%  +0  …", lines[1])
    assert "→" not in lines[2]
    assert lines[3] == "what may come next: | next| 50% → 100%"
    assert "→" not in Explanation((0, 1), ((likelier, last),)).table(width=60)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_and_experts_are_never_cut(width: int) -> None:
    wide = expecting(
        make_token("漢字🙂" * 9, 1, before="見出し 🙂" * 30, token="語" * 30), 1.0, 1.0
    )
    hostile = make_token("\x1b[31m" * 9, 1, before="\x1b]0;x\x07 way" * 30)
    many = make_token(" many", 1, experts_in=MANY_EXPERTS, experts_out={7: -12.25})
    explanation = Explanation((0,), ((wide, hostile, many, make_token("", 1)),))
    for table in (explanation.table(width=width), explanation.table(0, width)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", table)
        assert max(cell_len(line) for line in table.splitlines()) <= width
        assert all("[" in line for line in table.splitlines()[1:] if line.startswith("|"))
    for expert, change in {**MANY_EXPERTS, 7: -12.25}.items():
        assert f"{expert} ({change:+.2f})" in explanation.table(0, width)


def test_a_part_of_a_character_is_marked() -> None:
    part = make_token("", 1, token="", after="")
    _, line = str(Explanation((0,), ((part,),))).splitlines()
    assert line.startswith("|·| ")
    assert line.endswith("…the old[·]")


def test_nothing_found_is_said_and_is_json() -> None:
    far = make_token("a", 1, cases=(), confidence=0.0)
    explanation = Explanation((0,), ((expecting(far, float("nan"), 0.0),),))
    assert "nothing" in str(explanation)
    assert "nothing" in explanation.table(0)
    (token,) = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))["sequences"][0]
    assert token["effects"][0]["cases"] == []
    assert token["following"] == {"id": 6, "text": " next", "alone": None, "with_memory": 0.0}


def test_a_page_needs_a_folder(tmp_path: Path) -> None:
    explanation = Explanation((0,), ((make_token("a", 1),),))
    explanation.save(str(tmp_path / "page.html"))
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf8")
    with pytest.raises(ConfigError, match=r"no folder '.*none' to write 'page.html' to"):
        explanation.save(tmp_path / "none" / "page.html")
    with pytest.raises(ConfigError, match=r"is a folder\. Name a file in it"):
        explanation.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
