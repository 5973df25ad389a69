"""Explanations as tables of text and as JSON."""

from __future__ import annotations

import json
import math
import re

from helpers.explained import make_token
from knn_moe.explain.explanation import Explanation


def test_the_table() -> None:
    explanation = Explanation(
        (0, 1), ((make_token(" a"), make_token("b\n", experts_in={}, experts_out={})),)
    )
    lines = str(explanation).splitlines()
    assert lines[1].split() == ["|", "a|", "0.25", "2/2", "0", "…the", "old[", "man]", "and"]
    assert lines[2].startswith("|b⏎| ")
    assert "0/2" in lines[2]
    detail = explanation.table(layer=1).splitlines()
    assert "0.25" in detail[1]
    assert "0.50" in detail[1]
    assert detail[1].endswith("in 7 (+0.50) out 3 (-1.25)")
    assert detail[2].endswith("…the old[ man] and")
    assert repr(explanation).startswith("Explanation(2 tokens × 2 layers, mean λ 0.25)\n")
    long = Explanation((0, 1), ((make_token("a"),) * 30,))
    assert repr(long).endswith("… 10 more tokens: print it, or use its table()")
    assert len(repr(long).splitlines()) == 23
    assert len(str(long).splitlines()) == 31


def test_lines_keep_their_width_and_carry_no_commands() -> None:
    explanation = Explanation(
        (0,), ((make_token("\x1b[31m" * 9, 1, before="\x1b]0;x\x07 way" * 30),),)
    )
    for table in (explanation.table(), explanation.table(0), repr(explanation)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", table)
        assert all(len(line) <= 100 for line in table.splitlines())


def test_nothing_found_is_said_and_is_json() -> None:
    nothing = {"before": "", "token": "", "after": "", "row": None, "example": None}
    far = make_token(
        "a", 1, **nothing, distance=math.inf, squared_distance=math.inf, confidence=0.0
    )
    explanation = Explanation((0,), ((far,),))
    assert "nothing" in str(explanation)
    case = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))["sequences"][0][0][
        "cases"
    ][0]
    assert case["distance"] is case["squared_distance"] is case["row"] is None
