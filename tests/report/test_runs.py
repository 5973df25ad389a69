"""The page of runs: the right numbers, safe markup, and nothing shown that is not there."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

import pytest

from helpers.explained import make_effect, make_prediction
from helpers.html_page import Page, assert_self_contained
from knn_moe.evaluation.store import Run
from knn_moe.explain.explanation import ExplainedToken, LayerEffect
from knn_moe.report.passages import Passage
from knn_moe.report.runs import Introduction, render_runs
from knn_moe.tasks.sample import Sample

METHODS = ("zero-shot", "knn-paper", "knn-calibrated", "knn-shuffled")
LOSSES = (3.412, 3.401, 3.186, 3.656)
BAD = "</script><script>alert(1)</script><!-- <b onclick='x'>&amp;\u2028\ud800"


def make_run(method: str, loss: float, task: str = "demo", **facts: Any) -> Run:
    """A run on ten windows of text, whose losses differ from each other by little."""
    samples = [
        Sample(
            id=f"window-{place}",
            prompt="p",
            score=0.3 + place / 100 - loss / 100,
            nll=loss + place / 10 + 0.001 * (place * len(method) % 3),
            batch=0,
        )
        for place in range(10)
    ]
    known = {
        "task": task,
        "title": "Some text",
        "method": method,
        "scoring": "text",
        "model": {"name": "tiny-olmoe"},
        "data": "made up",
        "device": "cpu",
        "dtype": "float32",
        "seconds": 1.5,
        "method_facts": {},
        "note": "",
    }
    return Run({**known, **facts}, samples)


def make_runs(layers: int = 2, **facts: Any) -> list[Run]:
    """Runs of METHODS; all but the first have a memory attached to some layers."""
    runs = [make_run(METHODS[0], LOSSES[0], **facts)]
    for number in (1, 2, 3):
        routing = {
            "mean_confidence": {str(layer): number / 10 for layer in range(layers)},
            "rerouted": {str(layer): number / 5 for layer in range(layers)},
        }
        runs.append(make_run(METHODS[number], LOSSES[number], routing=routing, **facts))
    return runs


def make_passage(texts: tuple[str, ...] = ("The", " with", " statement", "\n")) -> Passage:
    tokens = tuple(
        ExplainedToken(place, text, tuple(make_case(layer, text) for layer in range(2)))
        for place, text in enumerate(texts)
    )
    expected = make_prediction("x", math.exp(-2), math.exp(-1))
    known = [replace(token, following=expected) for token in tokens[:-1]]
    return Passage("A passage", (*known, tokens[-1]))


def make_case(layer: int, text: str) -> LayerEffect:
    texts = {"before": text, "token": text, "after": text}
    return make_effect(layer, **texts, experts_in={1: 0.25}, experts_out={2: -0.25})


def data_of(page: Page, name: str) -> Any:
    """The JSON of a page's script with this id or class."""
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    place = next(n for n, one in enumerate(scripts) if name in (one.get("id"), one.get("class")))
    return json.loads(page.scripts[place], parse_constant=pytest.fail)


def test_the_page_is_whole_and_has_a_point_for_each_value() -> None:
    html = render_runs(make_runs(), "zero-shot", 100)
    assert_self_contained(html)
    page = Page(html)
    figures = data_of(page, "figures")
    points = [len(group["rows"]) for one in figures for group in one.get("groups", ())]
    assert points == [4, 3, 3, 3, 3, 3]  # scores, changes, those of losses, and of each third
    lines = [line["points"] for one in figures for line in one.get("lines", ())]
    assert [len(one) for one in lines] == [2] * 6
    assert len([attrs for _, attrs in page.tags if "data-figure" in attrs]) == len(figures) == 6
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(later <= sooner + 1 for sooner, later in pairwise(headings))


def test_a_point_lies_where_the_table_says() -> None:
    page = Page(render_runs(make_runs(), "zero-shot", 100))
    (results, *_) = tables_of(page)
    score = data_of(page, "figures")[0]["groups"][0]["rows"][1]
    row = results[1]
    assert score["method"] == row["method"] == "knn-paper"
    assert score["value"] == pytest.approx(100 * float(row["score"]), abs=1e-5)
    assert score["low"] == pytest.approx(100 * float(row["score_low"]), abs=1e-5)
    assert score["label"] == f"{100 * float(row['score']):.1f}"


def tables_of(page: Page) -> list[list[dict[str, str]]]:
    """The rows of each CSV file that the page offers."""
    links = [attrs["href"] or "" for _, attrs in page.tags if "download" in attrs]
    files = [unquote(link.partition(",")[2]) for link in links]
    return [list(csv.DictReader(io.StringIO(text))) for text in files]


def test_the_table_says_what_was_measured() -> None:
    runs = make_runs()
    html = render_runs(runs, "zero-shot", 100)
    text = " ".join(Page(html).text.split())
    for run in runs:
        mean = sum(sample.nll or 0.0 for sample in run.samples) / 10
        assert f"{math.exp(mean):.2f} {mean:.3f}" in text
    results = html[: html.index("</table>")]
    verdicts = re.findall(r'class="change (\w+)">', results)
    assert verdicts == ["better", "better", "better", "better", "worse", "worse"]
    assert "0.20 40.0 %" in text  # mean λ, rerouted of knn-calibrated
    assert "Every change is against zero-shot" in text
    assert "Holm" not in text


def test_several_tasks_are_corrected_for_their_number() -> None:
    runs = make_runs() + make_runs(task="other", note="Half of it.")
    page = Page(render_runs(runs, "zero-shot", 100))
    text = " ".join(page.text.split())
    assert "2 tasks were tested: by chance alone, one in twenty" in text
    captions = [figure["caption"] for figure in data_of(page, "figures")]
    assert "other: Mean confidence (λ) by layer" in captions
    assert "Some text: Half of it." in text


def test_parts_without_numbers_are_left_out() -> None:
    questions = make_run("zero-shot", 2.0, scoring="likelihood")
    page = Page(render_runs([questions], "zero-shot", 100))
    headings = [attrs["id"] for tag, attrs in page.tags if tag == "h2"]
    assert headings == ["results", "charts", "samples", "runs"]
    assert not re.search("Perplexity|Mean λ|pts,", page.text)
    assert "tiny-olmoe on demo" in page.text
    assert "The method zero-shot, compared with no other." in page.text


def test_an_introduction_has_a_title_text_and_passages() -> None:
    passage = make_passage()
    introduction = Introduction("A title", ("A headline.", "A story."), (passage,))
    page = Page(render_runs(make_runs(), "zero-shot", 100, introduction))
    assert "A title" in page.text
    assert "kNN-MoE: A title (tiny-olmoe on demo)" in page.text
    assert len(page.with_class("headline")) == 1
    assert "The with statement\n" in page.text
    assert [attrs["class"] for attrs in page.with_class("t")][-4:] == [
        "t", "t up-3", "t up-3", "t up-3 newline",
    ]  # fmt: skip
    data = json.loads(page.scripts[0])
    assert data["places"][0] is None
    assert data["places"][1]["said"] == "2.7 times likelier"
    *_, entered, left, cases = data["places"][2]["layers"][1]
    assert (entered, left) == ([[1, "+0.25"]], [[2, "\N{MINUS SIGN}0.25"]])
    assert data["texts"][cases[0]] == [" with", " with", " with", 0]


def test_hostile_text_stays_text() -> None:
    introduction = Introduction(BAD, (BAD,), (make_passage((BAD, BAD)),))
    facts = {"task": BAD, "title": BAD, "data": BAD, "model": {"name": BAD}, "note": BAD}
    html = render_runs(make_runs(**facts), "zero-shot", 100, introduction)
    page = Page(html)
    assert page.open == []
    assert (
        len(page.scripts) == 7
    )  # passages, questions, figures; licences, Plot, charts; the page's
    assert "<!--" not in html
    assert not any(tag == "b" and attrs for tag, attrs in page.tags)
    assert json.loads(page.scripts[0])["texts"] == [[BAD, BAD, BAD, 0]]
    assert "alert(1)" in page.text


@pytest.mark.parametrize(("loss", "shown"), [(math.inf, "infinite"), (math.nan, "not a number")])
def test_what_is_not_a_number_is_said_in_words(loss: float, shown: str) -> None:
    token = ExplainedToken(0, "x", (make_case(0, "x"),))
    share = math.exp(-loss)
    token = replace(token, following=make_prediction("x", share, share))
    passage = Passage("broken", (token, token))
    introduction = Introduction("Broken", (), (passage,))
    html = render_runs([make_run("zero-shot", 2.0)], "zero-shot", 100, introduction)
    page = Page(html)
    assert f"{shown} nats per token without the memory" in page.text
    json.loads(page.scripts[0], parse_constant=pytest.fail)
