"""The page of runs: the right numbers, safe markup, and nothing shown that is not there."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from typing import Any

import pytest

from helpers.explained import make_effect
from helpers.html_page import Page, assert_self_contained
from knn_moe.evaluation.store import Run
from knn_moe.explain.explanation import ExplainedToken, LayerEffect
from knn_moe.report.passages import Passage
from knn_moe.report.runs import Introduction, render_runs
from knn_moe.tasks.sample import Sample

METHODS = ("zero-shot", "knn-paper", "knn-calibrated", "knn-shuffled")
LOSSES = (3.412, 3.401, 3.186, 3.656)
BAD = "</script><script>alert(1)</script><!-- <b onclick='x'>&amp;\u2028\ud800"
SPACE = "\N{NARROW NO-BREAK SPACE}"


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
    return Passage("A passage", tokens, tuple((2.0, 1.0) for _ in texts[1:]))


def make_case(layer: int, text: str) -> LayerEffect:
    texts = {"before": text, "token": text, "after": text}
    return make_effect(layer, **texts, experts_in={1: 0.25}, experts_out={2: -0.25})


def test_the_page_is_whole_and_has_a_bar_for_each_value() -> None:
    html = render_runs(make_runs(), "zero-shot", 100)
    assert_self_contained(html)
    page = Page(html)
    legends, scores, changes, losses, by_layer, terciles = 3 * 4, 4, 3, 3, 2 * 2 * 3, 3 * 3
    count = legends + scores + changes + losses + by_layer + terciles
    assert len(page.with_class("bar")) == count
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(later <= sooner + 1 for sooner, later in pairwise(headings))
    coordinates = re.findall(r' (?:x|y|x1|x2|y1|y2|width|height)="([^"]*)"', html)
    assert all(math.isfinite(float(value)) for value in coordinates)


def test_the_table_says_what_was_measured() -> None:
    runs = make_runs()
    html = render_runs(runs, "zero-shot", 100)
    text = " ".join(Page(html).text.split())
    for run in runs:
        mean = sum(sample.nll or 0.0 for sample in run.samples) / 10
        assert f"{math.exp(mean):.2f} {mean:.3f}" in text
    verdicts = re.findall(r'<td class="change (\w+)">', html)
    assert verdicts == ["better", "better", "better", "better", "worse", "worse"]
    assert f"<td>0.20</td><td>40.0{SPACE}%</td>" in html  # mean λ, rerouted of knn-calibrated
    assert "Every change is against zero-shot" in text
    assert "Holm" not in text


def test_several_tasks_are_corrected_for_their_number() -> None:
    runs = make_runs() + make_runs(task="other", note="Half of it.")
    text = " ".join(Page(render_runs(runs, "zero-shot", 100)).text.split())
    assert "2 tasks were tested: by chance alone, one in twenty" in text
    assert "other: Mean confidence (λ) by layer" in text
    assert "Some text: Half of it." in text


def test_parts_without_numbers_are_left_out() -> None:
    questions = make_run("zero-shot", 2.0, scoring="likelihood")
    page = Page(render_runs([questions], "zero-shot", 100))
    headings = [attrs["id"] for tag, attrs in page.tags if tag == "h2"]
    assert headings == ["results", "charts", "runs"]
    assert not re.search("Perplexity|Mean λ|pts,", page.text)
    assert "tiny-olmoe on demo" in page.text
    assert "Zero-shot alone." in page.text


def test_an_introduction_has_a_title_text_and_passages() -> None:
    passage = make_passage()
    introduction = Introduction("A title", ("A headline.", "A story."), (passage,))
    page = Page(render_runs(make_runs(), "zero-shot", 100, introduction))
    assert "A title" in page.text
    assert len(page.with_class("headline")) == 1
    assert "The with statement\n" in page.text
    assert [attrs["class"] for attrs in page.with_class("t")][-4:] == [
        "t", "t up-3", "t up-3", "t up-3 newline",
    ]  # fmt: skip
    panels = json.loads(page.scripts[0])
    assert [panel["text"] for panel in panels] == [token.text for token in passage.tokens]
    assert panels[0] == {"text": "The", "cases": []}
    assert panels[1]["change"] == "2.7 times likelier"
    case = panels[2]["cases"][1]
    assert (case["layer"], case["token"], case["in"]) == (1, " with", ["1 (+0.25)"])


def test_hostile_text_stays_text() -> None:
    introduction = Introduction(BAD, (BAD,), (make_passage((BAD, BAD)),))
    facts = {"task": BAD, "title": BAD, "data": BAD, "model": {"name": BAD}, "note": BAD}
    html = render_runs(make_runs(**facts), "zero-shot", 100, introduction)
    page = Page(html)
    assert page.open == []
    assert len(page.scripts) == 2
    assert "<!--" not in html
    assert not any(tag == "b" and attrs for tag, attrs in page.tags)
    panel = json.loads(page.scripts[0])[1]
    assert panel["text"] == BAD
    assert [panel["cases"][0][part] for part in ("before", "token", "after")] == [BAD] * 3
    assert "alert(1)" in page.text


@pytest.mark.parametrize(("loss", "shown"), [(math.inf, "infinite"), (math.nan, "not a number")])
def test_what_is_not_a_number_is_said_in_words(loss: float, shown: str) -> None:
    token = ExplainedToken(0, "x", (make_case(0, "x"),))
    passage = Passage("broken", (token, token), ((loss, loss),))
    introduction = Introduction("Broken", (), (passage,))
    html = render_runs([make_run("zero-shot", 2.0)], "zero-shot", 100, introduction)
    page = Page(html)
    assert f"{shown} nats per token without the memory" in page.text
    json.loads(page.scripts[0], parse_constant=pytest.fail)
