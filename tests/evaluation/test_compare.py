"""Runs are compared: scores, paired changes, averages, and the page of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.made_runs import generated_run, likely_run, make_run
from knn_moe.errors import RunError
from knn_moe.evaluation.compare import AVERAGE, compare_runs, explain_doubts
from knn_moe.evaluation.store import Run
from knn_moe.report.runs import render_runs


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


def change_of(*runs: Run) -> Any:
    """Return the change of the second run against the first."""
    return compare_runs(runs, runs[0].method, resamples=500)[1].change


def test_a_baseline_without_answers_is_no_baseline() -> None:
    silent, phrase = generated_run("zero-shot", 0, 60), generated_run("knn", 18, 5)
    alone, knn = compare_runs([silent, phrase], "zero-shot", resamples=500)
    assert (alone.chance, alone.unparsed, alone.unparsed_share) == (0.25, 60, 1.0)
    assert (knn.unparsed, knn.unparsed_share) == (5, 5 / 60)
    assert knn.change is not None
    assert knn.change.difference == 0.3
    assert knn.change.p < 0.05
    assert not knn.change.significant
    reason = "zero-shot gave no answer in 60 of 60 outputs of quiz"
    assert knn.change.doubt == reason
    sentences = explain_doubts([alone, knn])
    assert sentences == [f"quiz: the change of knn is not judged, because {reason}."]
    assert knn.to_dict()["change"]["doubt"] == reason
    # Even far above chance: the gain may be no more than the form of the answers.
    assert not change_of(silent, generated_run("knn", 55, 0)).significant


def test_a_baseline_that_mostly_answers_is_one() -> None:
    half = generated_run("zero-shot", 20, 30)
    assert change_of(half, generated_run("knn", 40, 0)).significant
    most = generated_run("zero-shot", 20, 31)
    assert not change_of(most, generated_run("knn", 40, 0)).significant
    # A method that loses its answers is worse than a baseline that gave them.
    worse = change_of(generated_run("zero-shot", 40, 0), generated_run("knn", 0, 60))
    assert worse.significant
    assert worse.difference < 0


def test_two_scores_at_chance_are_not_told_apart() -> None:
    counts = [2, 4] * 200  # chance is 37.5 %, the mean over questions of 1/choices
    low = likely_run("zero-shot", [1.0] * 140 + [0.0] * 260, counts, "quiz")
    middle = likely_run("knn", [1.0] * 165 + [0.0] * 235, counts, "quiz")
    high = likely_run("knn", [1.0] * 190 + [0.0] * 210, counts, "quiz")
    alone, knn = compare_runs([low, middle], "zero-shot", resamples=500)
    assert alone.chance == knn.chance == 0.375
    assert alone.unparsed is None
    assert alone.unparsed_share is None
    assert knn.score.low <= 0.375 <= knn.score.high
    assert knn.change is not None
    assert knn.change.p < 0.05
    assert knn.change.doubt == "both scores are at chance (37.5 %)"
    assert change_of(low, high).significant  # one of them is above chance
    assert change_of(likely_run("a", [0.0] * 400, counts, "quiz"), middle).doubt  # below it
    # The other way round, a model falls to chance.
    assert change_of(replace_method(high, "zero-shot"), replace_method(low, "knn")).significant


def replace_method(run: Run, method: str) -> Run:
    return Run({**run.facts, "method": method}, run.samples)


def test_runs_of_earlier_versions_have_no_chance_level() -> None:
    old = generated_run("zero-shot", 10, 0, choices=None)
    new = generated_run("knn", 30, 0)
    alone, knn = compare_runs([old, new], "zero-shot", resamples=500)
    assert alone.chance is None
    assert alone.unparsed == 0
    assert knn.chance == 0.25
    assert knn.change is not None
    assert knn.change.doubt is None  # the newer run knows it, and is above chance
    mixed = Run(new.facts, [*old.samples[:30], *new.samples[30:]])  # of a run that was resumed
    assert compare_runs([mixed], "knn", resamples=10)[0].chance is None


def test_texts_are_never_at_chance() -> None:
    runs = [make_run(name, [score] * 30, scoring="text")
            for name, score in (("zero-shot", 0.1), ("knn", 0.2))]  # fmt: skip
    assert change_of(*runs).significant
    line = compare_runs(runs, "zero-shot", resamples=10)[0]
    assert (line.chance, line.unparsed) == (None, None)


def test_each_third_of_the_questions_is_judged_by_itself() -> None:
    # By perplexity: the first third above chance, the others at it.
    base = likely_run("zero-shot", ([1.0] * 20 + [0.0] * 10) + [0.0] * 60, [2] * 90, "quiz")
    knn = likely_run("knn", [1.0] * 30 + [0.0] * 30 + ([1.0] * 12 + [0.0] * 18), [2] * 90, "quiz")
    thirds = compare_runs([base, knn], "zero-shot", resamples=500)[1].by_perplexity
    assert thirds is not None
    assert thirds["low"].significant
    assert thirds["high"].p < 0.05
    assert not thirds["high"].significant


def test_one_bad_baseline_spoils_the_average() -> None:
    runs = [
        generated_run("zero-shot", 0, 60, task="a"), generated_run("knn", 30, 0, task="a"),
        *(likely_run(name, [1.0] * 100, [4] * 100, "b") for name in ("zero-shot", "knn")),
    ]  # fmt: skip
    lines = compare_runs(runs, "zero-shot", resamples=500)
    average = next(line for line in lines if line.task == AVERAGE and line.method == "knn")
    assert average.chance == 0.25
    assert average.unparsed_share == 0.0  # of the 60 that were generated
    assert average.change is not None
    assert average.change.p < 0.05
    assert average.change.doubt == "zero-shot gave no answer in 60 of 60 outputs of a"


def test_the_page_says_what_is_not_judged() -> None:
    runs = [generated_run("zero-shot", 0, 60), generated_run("knn", 18, 5)]
    page = " ".join(render_runs(runs, "zero-shot", resamples=200).split())
    assert 'class="change not">' in page
    assert 'class="change better"' not in page
    for text in ("Chance", "Unparsed", "25.0", "100.0", "8.3"):
        assert text in page
    assert "is not judged, because zero-shot gave no answer in 60 of 60 outputs" in page
    assert "Change of the score, in percentage points" not in page  # nothing to draw
    texts = [make_run(name, [0.5] * 9, scoring="text") for name in ("zero-shot", "knn")]
    assert "Unparsed" not in render_runs(texts, "zero-shot", resamples=10)
