"""The report page: right numbers, safe markup, whole files."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from knn_moe.demo.result import (
    DemoResult,
    ExpertUse,
    MemoryFacts,
    Passage,
    PassageToken,
    Score,
    Tercile,
)
from knn_moe.explain.explanation import RecalledCase
from knn_moe.report import page, passages, words
from knn_moe.report.page import render_report, write_report
from knn_moe.support.statistics import Comparison

WAYS = ("zero-shot", "kNN-MoE (paper)", "kNN-MoE (strong)", "control: values shuffled")
NLLS = (3.412, 3.401, 3.186, 3.656)
VOID = {"meta", "link", "br", "hr", "img", "input"}
TEXT = """The "with" statement is used to wrap the execution of a block with methods
defined by a context manager:

   with EXPRESSION as TARGET:
       SUITE

is semantically equivalent to calling "__enter__()" and, at the end, "__exit__()". If an
exception was raised & not caught, its type <class 'ValueError'> is passed on."""


def make_result(layers: int = 4, experts: int = 16, texts: tuple[str, ...] = (TEXT,)) -> DemoResult:
    draw = random.Random(0)
    before, after = (_expert_use(draw, layers, experts) for _ in range(2))
    return DemoResult(
        model="tiny-olmoe",
        reference="39 topics of Python's documentation",
        reference_tokens=22_600,
        test="40 other topics of Python's documentation",
        layers=tuple(range(layers)),
        top_k=2,
        test_tokens=11_264,
        test_windows=88,
        choices=256,
        memories=(
            MemoryFacts(WAYS[1], "S = 1, η = 0.02, K = 1", "paper", 22_528, 52_000_000, 14.2),
            MemoryFacts(WAYS[2], "S = 5, η = 5, K = 8", "strong", 22_528, 52_000_000, 61.0),
        ),
        scores=tuple(_score(number, layers) for number in range(4)),
        experts=ExpertUse(before, after),
        terciles=tuple(_tercile(number) for number in range(3)),
        passages=tuple(_passage(draw, text, layers, experts) for text in texts),
    )


def _score(number: int, layers: int) -> Score:
    score = Score(WAYS[number], NLLS[number], 0.341 + number / 100, 0.61 - number / 100)
    if number == 0:
        return score
    return replace(
        score,
        nll_change=_nll_change(number),
        accuracy_change=Comparison(number / 100, 0.004, 0.017, 0.0021),
        choice_change=Comparison(-number / 100, -0.03, 0.01, 0.31),
        confidence=tuple(0.1 * number + 0.07 * layer / layers for layer in range(layers)),
        rerouted=tuple(0.05 * number + 0.11 * layer / layers for layer in range(layers)),
        control=number == 3,
    )


def _nll_change(number: int, scale: float = 1.0) -> Comparison:
    change = (NLLS[number] - NLLS[0]) * scale
    return Comparison(change, change - 0.014, change + 0.014, 0.09 if number == 1 else 0.0)


def _tercile(number: int) -> Tercile:
    alone = 2.6 + 0.7 * number
    change = {WAYS[i]: _nll_change(i, (number + 1) / 2) for i in (1, 2, 3)}
    nll = {WAYS[0]: alone, **{way: alone + one.difference for way, one in change.items()}}
    name = ("easiest third", "middle third", "hardest third")[number]
    return Tercile(name, (math.exp(alone - 0.4), math.exp(alone + 0.3)), nll, change)


def _expert_use(draw: random.Random, layers: int, experts: int) -> tuple[tuple[float, ...], ...]:
    rows = ([draw.random() ** 3 for _ in range(experts)] for _ in range(layers))
    return tuple(tuple(2 * value / sum(row) for value in row) for row in rows)


def _passage(draw: random.Random, text: str, layers: int, experts: int) -> Passage:
    pieces = re.findall(r"\n+| +(?= )| ?\w{1,5}| ?[^\w\s]+|\s", text)
    tokens = []
    for number, piece in enumerate(pieces):
        before = draw.expovariate(0.4)
        after = max(0.0, before - draw.gauss(0.25, 0.6))
        cases = tuple(
            RecalledCase(
                layer,
                "".join(pieces[: 12 + layer]),
                *pieces[12 + layer : 14 + layer],
                draw.uniform(0.3, 1.6),
                draw.random(),
                *(({draw.randrange(experts): 0.25},) * 2 if draw.random() < 0.4 else ({}, {})),
                *(0.5, 17, 3, 1.25),
            )
            for layer in range(layers)
        )
        likelihood = (before, after) if number else (None, None)
        tokens.append(PassageToken(piece, *likelihood, cases if number else ()))
    return Passage("The with statement", tuple(tokens))


class Page(HTMLParser):
    """Tags as they open and close, and text as a reader gets it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text += data

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]


def numbers(svg: str) -> list[float]:
    found = re.findall(r' (?:x|y|x1|x2|y1|y2|width|height|fill-opacity)="([^"]*)"', svg)
    return [float(value) for value in found]


@pytest.mark.parametrize(("layers", "experts"), [(4, 16), (1, 8), (3, 64), (2, 128)])
def test_page_is_whole_and_loads_nothing(layers: int, experts: int) -> None:
    html = render_report(make_result(layers, experts))
    parsed = Page(html)
    assert parsed.open == []
    assert not re.search(r"https?://|url\(|@import|<link|<iframe|<img", html)
    assert not any({"src", "href", "srcset"} & attrs.keys() for _, attrs in parsed.tags)
    assert len(parsed.with_class("cell")) == 3 * layers * experts
    assert len(parsed.with_class("bar")) == 2 * 3 * layers + 3 * 3 + 2 * 3  # with two legends
    assert all(math.isfinite(value) for value in numbers(html))
    headings = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch(r"h\d", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(later <= sooner + 1 for sooner, later in pairwise(headings))


def test_table_says_what_was_measured() -> None:
    text = Page(render_report(make_result())).text.replace("\xa0", " ")
    assert all(way in text for way in WAYS)
    assert all(shown in text for shown in ("30.33", "29.99", "24.19", "38.71"))
    assert "With kNN-MoE (strong), perplexity falls from 30.33 to 24.19 (p < 0.001)." in text
    assert "a control, a memory that should not help, it rises to 38.71 (p < 0.001)." in text
    assert "−0.240 to −0.212" in text
    assert "+1.0\N{NARROW NO-BREAK SPACE}pts" in text
    assert "p = 0.002" in text
    rows = re.findall(r'<td class="change (\w+)">', render_report(make_result()))
    assert rows[:9] == ["no", "better", "no", "better", "better", "no", "worse", "better", "no"]
    assert rows[9:] == ["no", "better", "worse"] * 3  # the thirds
    words_only = " ".join(text.split())
    assert "22,600 tokens of 39 topics of Python's documentation. It was tested on 40" in words_only
    assert "11,264 tokens in 88 windows" in words_only
    assert "S = 5, η = 5, K = 8 strong 22,528 52.0 MB 61.0" in words_only


def test_a_control_is_known_by_its_flag() -> None:
    scores = make_result().scores
    unmarked = words.headline([replace(score, control=False) for score in scores])
    assert unmarked.startswith("With control: values shuffled, perplexity rises")
    assert "should not help" not in unmarked
    renamed = (*scores[:3], replace(scores[3], way="noise"))
    assert words.headline(renamed) == words.headline(scores)


def test_expert_maps_name_the_largest_moves() -> None:
    result = make_result(2, 3)
    experts = ExpertUse(
        before=((0.5, 1.0, 0.5), (0.7, 0.6, 0.7)), after=((0.9, 0.6, 0.5), (0.7, 0.5, 0.8))
    )
    html = render_report(replace(result, experts=experts))
    space = "\N{NARROW NO-BREAK SPACE}"
    assert f"<title>layer 0, expert 1: −40.0{space}pts</title>" in html
    moves = re.findall(r"<li><span>(layer \d, expert \d)</span>.*<b>(.*?)</b></li>", html)
    assert moves == [
        ("layer 0, expert 0", f"+40.0{space}pts"),
        ("layer 1, expert 2", f"+10.0{space}pts"),
        ("layer 0, expert 1", f"−40.0{space}pts"),
        ("layer 1, expert 1", f"−10.0{space}pts"),
    ]


def test_thirds_show_the_change_against_the_model_alone() -> None:
    text = Page(render_report(make_result())).text.replace("\xa0", " ")
    assert all(shown in text for shown in ("−0.113", "−0.226", "−0.339", "+0.366"))
    assert "9.03 to 18.17" in text
    assert "−0.353 to −0.325" in text
    assert "hardest third, kNN-MoE (strong): −0.3390" in text


def test_thirds_draw_the_change_that_was_measured() -> None:
    result = make_result()
    measured = Comparison(-0.5, -0.75, -0.25, 0.01)  # not the difference of the means
    change = dict.fromkeys(WAYS[1:], measured)
    html = render_report(
        replace(result, terciles=tuple(replace(t, change=change) for t in result.terciles))
    )
    assert html.count("kNN-MoE (strong): −0.5000</title>") == 3
    assert html.count('<path class="whisker"') == 9
    assert html.count("−0.750 to −0.250") == 9


def test_tokens_keep_their_text_and_carry_their_cases() -> None:
    parsed = Page(render_report(make_result()))
    assert TEXT in parsed.text
    shown = make_result().passages[0].tokens
    data: list[dict[str, Any]] = json.loads(parsed.scripts[0])
    assert "".join(token["text"] for token in data) == TEXT
    assert data[0] == {"text": "The", "cases": []}
    assert data[5]["before"] == words.probability(shown[5].nll_before or 0.0)
    assert len(data[5]["cases"]) == 4
    case = data[5]["cases"][1]
    recalled = shown[5].cases[1]
    assert case["layer"] == 1
    assert [case[part] for part in ("before", "token", "after")] == [
        recalled.before,
        recalled.token,
        recalled.after,
    ]
    swaps = [(one, told) for one, told in zip(shown[5].cases, data[5]["cases"], strict=True)]
    assert any(one.experts_in for one, _ in swaps)
    for one, told in swaps:
        assert told["in"] == [f"{expert} (+0.25)" for expert in one.experts_in]


def test_hostile_text_stays_text() -> None:
    bad = "</script><script>alert(1)</script><!-- <b onclick='x'>&amp;\u2028\ud800"
    result = make_result(texts=())
    case = RecalledCase(0, bad, bad, bad, 0.5, 0.5, {1: 0.3}, {2: -0.3}, 1.0, 17, 3, 1.25)
    passage = Passage(bad, (PassageToken(bad, 1.0, 2.0, (case,)),))
    scores = (replace(result.scores[0], way=bad), *result.scores[1:])
    thirds = [replace(t, name=bad, nll={bad: 1.0, **t.nll}) for t in result.terciles]
    memories = (replace(result.memories[0], folder=bad, settings=bad),)
    hostile = replace(
        result,
        model=bad,
        reference=bad,
        test=bad,
        scores=scores,
        terciles=tuple(thirds),
        passages=(passage,),
        memories=memories,
    )
    html = render_report(hostile)
    parsed = Page(html)
    assert parsed.open == []
    assert len(parsed.scripts) == 2
    assert "<!--" not in html
    assert not any(tag == "b" and attrs for tag, attrs in parsed.tags)
    data = json.loads(parsed.scripts[0])
    assert data[0]["text"] == bad
    assert [data[0]["cases"][0][part] for part in ("before", "token", "after")] == [bad] * 3
    assert "alert(1)" in parsed.text


def test_empty_parts_are_left_out() -> None:
    result = make_result(texts=())
    bare = replace(
        result,
        scores=tuple(replace(score, confidence=(), rerouted=()) for score in result.scores),
        experts=ExpertUse((), ()),
        terciles=(),
        memories=(),
    )
    parsed = Page(render_report(bare))
    assert [attrs["id"] for tag, attrs in parsed.tags if tag == "h2"] == ["scores", "limits"]
    assert len(parsed.scripts) == 1
    assert not any(tag == "script" and attrs for tag, attrs in parsed.tags)
    only = Page(render_report(replace(bare, scores=bare.scores[:1])))
    assert "perplexity 30.33; no memory was compared" in only.text
    assert "Nothing was measured" in Page(render_report(replace(bare, scores=()))).text


@pytest.mark.parametrize(
    ("nll", "shown"), [(math.inf, "infinite"), (math.nan, "not a number"), (1e4, "10,000.000")]
)
def test_what_is_not_a_number_is_said_in_words(nll: float, shown: str) -> None:
    result = make_result(1, 4)
    broken = Comparison(nll, math.nan, math.nan, math.nan)
    change, nlls = dict.fromkeys(WAYS, broken), dict.fromkeys(WAYS, nll)
    case = RecalledCase(0, "", "", "", nll, math.nan, {1: nll}, {}, math.nan, None, None, nll)
    token = PassageToken("x", nll, nll, (case,))
    html = render_report(
        replace(
            result,
            scores=(result.scores[0], replace(result.scores[2], nll=nll, nll_change=broken)),
            terciles=(Tercile("all", (1.0, nll), nlls, change),),
            experts=ExpertUse(((nll, 1.0, 0.5, 0.5),), ((0.5, 0.5, 0.5, math.nan),)),
            passages=(Passage("broken", (token,)),),
        )
    )
    parsed = Page(html)
    assert html.count(f"<td>{shown}</td>") == 3  # the score, and the third alone and with it
    reached = words.perplexity(replace(result.scores[2], nll=nll).perplexity)
    assert f"With kNN-MoE (strong), perplexity goes from 30.33 to {reached}" in parsed.text
    json.loads(parsed.scripts[0], parse_constant=pytest.fail)
    assert all(math.isfinite(value) for value in numbers(html))


def test_numbers_are_said_plainly() -> None:
    space = "\N{NARROW NO-BREAK SPACE}"
    assert words.p_value(0.0) == "p\xa0<\xa00.001"
    assert words.p_value(0.0314) == "p\xa0=\xa00.031"
    assert words.NATS_CHANGE.say(-0.0001) == "0.000"
    assert words.perplexity(22026.4658) == "22,026.47"
    assert words.perplexity(3.8e260) == "3.8e+260"
    assert words.perplexity(math.inf) == "infinite"
    assert words.probability(0.0) == f"> 99.9{space}%"
    assert words.probability(math.log(9)) == f"11{space}%"
    assert words.probability(50.0) == f"< 0.001{space}%"
    assert words.likelier(2.0, 1.0) == "2.7 times likelier"
    assert words.likelier(1.0, 20.0) == "over 1,000 times less likely"
    assert words.likelier(1.0, 1.01) == "about as likely as before"
    assert [words.size(n) for n in (999, 52_000_000)] == ["999 bytes", "52.0 MB"]


@pytest.mark.parametrize(
    ("factor", "step"), [(1.09, 0), (1.11, 1), (1.6, 2), (2.1, 3), (40.0, 4), (1 / 1.6, -2)]
)
def test_a_token_is_coloured_by_its_likelihood(factor: float, step: int) -> None:
    assert passages.level(3.0, 3.0 - math.log(factor)) == step


def test_page_replaces_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    write_report(make_result(), target)
    assert target.read_text(encoding="utf8") == render_report(make_result())
    assert list(tmp_path.iterdir()) == [target]
    half_a_character = replace(make_result(), model="broken \ud83d")
    write_report(half_a_character, target)
    assert "broken &#55357;" in target.read_text(encoding="utf8")


def test_failure_leaves_the_page_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    ragged = replace(make_result(), experts=ExpertUse(((1.0, 1.0),), ((2.0,),)))
    with pytest.raises(ValueError, match="shorter"):
        write_report(ragged, target)
    monkeypatch.setattr(page, "render_report", lambda result: "new")
    monkeypatch.setattr(Path, "replace", _disk_fails)
    with pytest.raises(OSError, match="no space"):
        write_report(make_result(), target)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert target.read_text() == "old"


def _disk_fails(self: Path, target: Path) -> None:
    assert self.read_text() == "new"
    raise OSError("no space")
