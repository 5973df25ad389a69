"""Marks of a table: which way a significant difference goes."""

from __future__ import annotations

import pytest

from knn_moe.evaluation.compare import Line
from knn_moe.reproduce.results import BETTER, WORSE, mark
from knn_moe.support.statistics import Accuracy, Comparison


@pytest.mark.parametrize(
    ("difference", "p", "accuracy", "loss"),
    [
        (0.1, 0.01, BETTER, WORSE),
        (-0.1, 0.01, WORSE, BETTER),
        (0.1, 0.2, "", ""),
        (0, 0.01, "", ""),
    ],
)
def test_marks_say_which_way(difference: float, p: float, accuracy: str, loss: str) -> None:
    change = Comparison(difference, difference - 0.1, difference + 0.1, p)
    line = Line(
        task="a", title="A", method="b", scoring="text", items=9, score=Accuracy(0.5, 0.4, 0.6, 9),
        nll=1.0, unparsed=0, near_ties=0, change=change, nll_change=change,
    )  # fmt: skip
    assert mark(line) == accuracy
    assert mark(line, lower_is_better=True) == loss
