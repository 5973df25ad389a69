"""Runs are compared: scores, paired changes, averages, and the page of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from knn_moe.errors import RunError
from knn_moe.evaluation.compare import AVERAGE, compare_runs
from knn_moe.evaluation.store import Run
from knn_moe.report.runs import render_runs
from knn_moe.tasks.sample import Sample


def make_run(method: str, scores: list[float], task: str = "quiz", **facts: Any) -> Run:
    samples = [
        Sample(id=f"{place:03}", prompt="p", score=score, nll=2.0 + place / 100, batch=0,
               parsed="A", margin=0.5)
        for place, score in enumerate(scores)
    ]  # fmt: skip
    known = {"task": task, "title": task, "method": method, "scoring": "likelihood", "asked": "x"}
    known |= {"data": "", "device": "cpu", "dtype": "float32"}
    more = {"finished": True, "seconds": 1.0, "model": {"name": "m"}, "method_facts": {}}
    more["note"] = "Nothing of note."
    return Run({**known, **more, **facts}, samples)


def test_a_run_is_compared_with_the_baseline() -> None:
    base = make_run("zero-shot", [0.0, 1.0] * 50)
    better = make_run("knn", [0.0, 1.0, 1.0, 1.0] * 25)
    lines = compare_runs([better, base], "zero-shot", resamples=500)
    assert [line.method for line in lines] == ["zero-shot", "knn"]
    alone, knn = lines
    assert alone.change is None
    assert alone.score.mean == 0.5
    assert knn.change is not None
    assert knn.change.difference == pytest.approx(0.25)
    assert knn.change.significant
    assert knn.adjusted_p == knn.change.p
    assert knn.by_perplexity is not None
    assert set(knn.by_perplexity) == {"low", "mid", "high"}


def test_the_loss_of_the_right_answer_is_compared_for_reworded_questions_too() -> None:
    right = [(-1.0, -4.0), (-6.0, -2.0), (-3.0, -5.0)]  # of A and of B

    def answered(method: str, nearer: float, **facts: Any) -> Run:
        run = make_run(method, [1.0, 1.0, 0.0], preparation_seconds=nearer, **facts)
        samples = [
            replace(sample, answer=letter, likelihoods=tuple(one + nearer for one in pair))
            for sample, letter, pair in zip(run.samples, "ABB", right, strict=True)
        ]
        return Run(run.facts, samples)

    runs = [answered("zero-shot", 0.0), answered("knn", 0.5), answered("few", 0.25, reworded=True)]
    alone, knn, few = compare_runs(runs, "zero-shot", resamples=100)
    assert alone.answer_loss == pytest.approx((1 + 2 + 5) / 3)
    assert alone.answer_change is None
    for line, nearer in ((knn, 0.5), (few, 0.25)):
        assert line.answer_change is not None
        assert line.answer_change.difference == pytest.approx(-nearer)
        assert line.preparation_seconds == nearer
    assert few.nll_change is None
    untold = compare_runs([make_run("zero-shot", [1.0])], "zero-shot", resamples=10)
    assert untold[0].answer_loss is None


def test_the_average_is_over_all_questions() -> None:
    runs = [
        make_run("zero-shot", [1.0] * 30, "a"), make_run("knn", [1.0] * 30, "a"),
        make_run("zero-shot", [0.0] * 10, "b"), make_run("knn", [1.0] * 10, "b"),
        make_run("zero-shot", [0.5] * 5, "c", scoring="text"),
        make_run("knn", [0.5] * 5, "c", scoring="text"),
    ]  # fmt: skip
    lines = compare_runs(runs, "zero-shot", resamples=200)
    average = {line.method: line for line in lines if line.task == AVERAGE}
    assert average["zero-shot"].score.mean == 0.75  # text has no right and wrong
    assert average["knn"].items == 40
    change = average["knn"].change
    assert change is not None
    assert change.difference == pytest.approx(0.25)
    tested = {line.task: line for line in lines if line.method == "knn" and line.change}
    assert tested["b"].adjusted_p is not None
    assert tested["b"].adjusted_p >= tested["b"].change.p  # type: ignore[union-attr]


def test_runs_of_other_questions_are_not_compared() -> None:
    runs = [make_run("zero-shot", [1.0] * 4), make_run("knn", [1.0] * 4, asked="y")]
    with pytest.raises(RunError, match="differ in asked on quiz"):
        compare_runs(runs, "zero-shot")
    shorter = [make_run("zero-shot", [1.0] * 4), make_run("knn", [1.0] * 3)]
    with pytest.raises(RunError, match="were not asked the same questions of quiz"):
        compare_runs(shorter, "zero-shot")
    other = [make_run("zero-shot", [1.0] * 4), make_run("knn", [1.0] * 4, model={"name": "n"})]
    with pytest.raises(RunError, match="differ in model on quiz, which could be mistaken for"):
        compare_runs(other, "zero-shot")
    with pytest.raises(RunError, match="two runs of knn on quiz"):
        compare_runs([*runs, make_run("knn", [1.0] * 4)], "zero-shot")
    with pytest.raises(RunError, match=r"no run of 'sft' to compare with. Available: knn, zero"):
        compare_runs(runs, "sft")


def test_a_single_window_of_text_has_the_widest_interval() -> None:
    (line,) = compare_runs([make_run("zero-shot", [0.3], scoring="text")], "zero-shot")
    assert (line.score.mean, line.score.low, line.score.high) == (0.3, 0.0, 1.0)


def test_the_page_of_runs_needs_no_network() -> None:
    runs = [make_run("zero-shot", [0.0, 1.0] * 20), make_run("knn", [1.0] * 40)]
    page = render_runs(runs, "zero-shot", resamples=200)
    assert page.count("<svg") >= 3
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "50.0" in page
