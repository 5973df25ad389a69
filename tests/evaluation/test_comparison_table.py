"""How a notebook and print show a comparison."""

from __future__ import annotations

from helpers.made_runs import generated_run, make_run
from knn_moe.evaluation.compare import compare_runs


def test_a_comparison_is_a_list_and_a_table() -> None:
    base = make_run("zero-shot", [0.0, 1.0] * 50)
    better = make_run("<knn>", [0.0, 1.0, 1.0, 1.0] * 25)
    lines = compare_runs([better, base], "zero-shot", resamples=500)
    assert len(lines) == 2
    assert lines[1].method == "<knn>"
    title, *rest = str(lines).splitlines()
    assert "against zero-shot" in title
    shown = "\n".join(rest)
    assert "quiz, zero-shot\n  items            100\n  score            50.0" in shown
    assert "quiz, <knn>\n  items            100\n  score            75.0" in shown
    change = rest[-3]
    assert change.startswith("  change of score  +25.0")
    assert "p\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}" in change
    assert max(map(len, rest)) <= 80
    html = lines._repr_html_()
    assert "&lt;knn&gt;" in html
    assert "<knn>" not in html
    assert html.count("<tr>") == 3


def test_a_change_that_is_not_judged_has_no_p_and_a_note() -> None:
    runs = [generated_run("zero-shot", 0, 60), generated_run("knn", 40, 0)]
    shown = str(compare_runs(runs, "zero-shot", resamples=200))
    assert "not judged" in shown
    (change,) = [line for line in shown.splitlines() if "change of score  +" in line]
    assert change.endswith("not judged")
    assert "zero-shot gave no answer in 60 of 60 outputs" in shown.splitlines()[-1]


def test_a_comparison_on_several_tasks_says_that_p_is_corrected() -> None:
    runs = [
        make_run(method, scores, task=task)
        for task in ("quiz", "riddles")
        for method, scores in (("zero-shot", [0.0, 1.0] * 50), ("knn", [0.0, 1.0, 1.0, 1.0] * 25))
    ]
    shown = str(compare_runs(runs, "zero-shot", resamples=200))
    assert shown.splitlines()[-1] == "The p of a task's score is corrected for 2 tasks (Holm)."
    assert "Holm" not in str(compare_runs(runs[:2], "zero-shot", resamples=200))
