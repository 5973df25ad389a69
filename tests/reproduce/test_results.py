"""Marks of a table: which way a significant difference goes."""

from __future__ import annotations

import pytest

from helpers.made_runs import generated_run
from knn_moe.evaluation.compare import Line, compare_runs
from knn_moe.reproduce.results import BETTER, DOUBTED, WORSE, accuracy_cell, mark
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
        nll=1.0, near_ties=0, change=change, nll_change=change,
    )  # fmt: skip
    assert mark(line) == accuracy
    assert mark(line, lower_is_better=True) == loss


def test_a_change_in_doubt_is_neither_better_nor_worse() -> None:
    runs = [generated_run("zero-shot", 0, 60), generated_run("knn", 18, 6)]
    alone, knn = compare_runs(runs, "zero-shot", resamples=200)
    assert mark(knn) == DOUBTED
    cell = accuracy_cell(knn)
    assert cell.text == f"30.00{DOUBTED} (10% unparsed)"
    assert cell.change is not None
    assert cell.change["doubt"].startswith("zero-shot gave no answer")
    assert accuracy_cell(alone).text == "0.00 (100% unparsed)"
