"""The page of an explanation: complete, self-contained, safe for hostile text, and it works in a
browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import PreTrainedModel

from helpers.browser import (
    SCHEMES,
    WIDTHS,
    assert_everything_fits,
    assert_labels_are_apart,
    look_at,
)
from helpers.explained import make_effect, make_prediction, make_token
from helpers.html_page import Page, assert_self_contained
from helpers.zoo import BUILD
from knn_moe import RoutingConfig, attach, build_memory
from knn_moe.explain.explanation import ExplainedToken, Explanation
from knn_moe.explain.page import render_explanation
from knn_moe.explain.reader import FACTORS, colour, find_telling, show_tokens

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

K = 5
CELLS = '.map g[aria-label="cell"] rect'
REFERENCE = [
    "It’s 我们 🙂 and don’t go.",
    "A fever is a symptom; don’t panic.",
    "We’re to go.",
]
TEXT = "Don’t say it’s a fever 🙂\nor 我们 go"


@pytest.fixture(scope="module")
def explanation(tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any) -> Explanation:
    memory = build_memory(tiny_olmoe, tiny_tokenizer, REFERENCE, replace(BUILD, max_length=64))
    with attach(tiny_olmoe, memory, RoutingConfig(k=K)) as routing:
        return routing.explain(TEXT, tokenizer=tiny_tokenizer)


@pytest.fixture(scope="module")
def page_file(explanation: Explanation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    explanation.save(path)
    return path


def data_of(html: str, number: int = 0) -> dict[str, Any]:
    """Return what the script of a text reads."""
    found: dict[str, Any] = json.loads(Page(html).scripts[number])
    return found


def before(alone: float, with_memory: float, confidence: float = 0.25) -> ExplainedToken:
    """Return a token before one of these probabilities."""
    expected = make_prediction(" next", alone, with_memory)
    token = make_token("a", 1, confidence=confidence)
    return replace(token, predictions=(expected,), following=expected)


def test_the_data_is_what_was_explained(explanation: Explanation) -> None:
    html = render_explanation(explanation)
    assert_self_contained(html)
    data, tokens = data_of(html), explanation.tokens
    assert data["layers"] == list(explanation.layers)
    assert len(data["places"]) == len(tokens) + 1
    assert data["places"][0] is None
    for place, token in zip(data["places"][1:], tokens, strict=True):
        if token.following is not None:
            assert place["bars"] == [
                pytest.approx(share, abs=1e-4)
                for share in (token.following.alone, token.following.with_memory)
            ]
        came = [[name for name, _, yes in run if yes] for run in place["expected"]]
        likely = {} if token.following is None else {token.following.text: 1}
        assert all(set(names) <= set(likely) for names in came)
        for shown, effect in zip(place["layers"], token.effects, strict=True):
            confidence, used, alone, entered, left, cases = shown
            assert confidence == pytest.approx(1000 * effect.confidence, abs=0.51)
            assert (tuple(used), tuple(alone)) == (effect.experts, effect.experts_alone)
            assert [expert for expert, _ in entered] == list(effect.experts_in)
            assert [expert for expert, _ in left] == list(effect.experts_out)
            texts, weights, distances = cases[::3], cases[1::3], cases[2::3]
            assert [tuple(data["texts"][text]) for text in texts] == [
                (case.before, case.token, case.after, case.example) for case in effect.cases
            ]
            assert len(weights) == K
            assert sum(weights) == pytest.approx(10_000, abs=K)
            assert distances == sorted(distances)
    shown = Page(html).with_class("t")[2 * len(FACTORS) + 1 :]
    assert len(shown) == len(tokens) + 1
    assert TEXT in Page(html).text
    assert "\N{REPLACEMENT CHARACTER}" not in html.split('<script type="text/plain"')[0]


def test_it_opens_on_the_token_that_rose_most() -> None:
    last = replace(before(0.5, 0.5), following=None)
    assert find_telling([before(0.1, 0.2), before(1e-9, 1e-5), before(0.5, 0.7), last]) == 3
    # If none rose, on the one that was predicted with the largest λ; else on what may follow.
    assert find_telling([before(0.2, 0.1), before(0.3, 0.1, 0.9), last]) == 2
    assert find_telling([last]) == 1
    assert find_telling([make_token("a")]) == 0
    data = show_tokens("", [before(0.1, 0.2), last]).data
    assert (data["opens"], data["rise"]) == (1, pytest.approx(0.1))


def test_a_colour_says_how_often_likelier() -> None:
    assert [colour(2.0, after) for after in (2.0, 1.5, 0.0, 2.5, 4.0)] == [0, 2, 4, -2, -4]


def test_the_end_of_a_long_text_is_shown() -> None:
    token = make_token("ab ", 2)
    html = render_explanation(Explanation((0, 1), ((token,) * 50, (token,) * 3)), most_cases=40)
    text = " ".join(Page(html).text.split())
    assert "The model read 53 tokens" in text
    assert "The first 40 tokens are left out" in text
    assert [len(data_of(html, number)["places"]) for number in (0, 1)] == [10, 3]
    wide = Explanation((0,), ((replace(token, effects=(make_effect(0),) * 9),),))
    assert len(data_of(render_explanation(wide, most_cases=1))["places"]) == 1


def test_hostile_text_stays_text(chromium: Browser, tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><!-- <b onclick='x'>&amp;\u2028\ud800"
    token = make_token(bad, 1, before=bad, token=bad, after=bad)
    token = replace(token, following=make_prediction(bad, 0.1, 0.2))
    token = replace(token, predictions=(token.following,) if token.following else ())
    explanation = Explanation((0,), ((token, token),), bad, bad)
    html = render_explanation(explanation)
    parsed = Page(html)
    assert parsed.open == []
    assert len(parsed.scripts) == 5
    assert "<!--" not in html
    assert not any(tag == "b" for tag, _ in parsed.tags)
    data = data_of(html)
    assert data["texts"] == [[bad, bad, bad, 0]]
    assert data["places"][1]["expected"][0][0][0] == bad
    explanation.save(tmp_path / "page.html")
    with look_at(chromium, tmp_path / "page.html") as page:
        page.on("dialog", lambda dialog: pytest.fail("a text ran as a script"))
        assert "alert(1)" in page.locator("#panel .case").first.inner_text()
        assert page.locator("#panel b[onclick]").count() == 0


def test_nothing_recalled_and_nothing_found_are_said(chromium: Browser, tmp_path: Path) -> None:
    silent = Explanation((), ((make_token("a", 0),),))
    assert "nothing was recalled" in Page(render_explanation(silent)).text
    far = make_token("a", 1, cases=())
    Explanation((0,), ((far, far),)).save(tmp_path / "page.html")
    with look_at(chromium, tmp_path / "page.html") as page:
        page.locator(".text .t").nth(1).click()
        assert "no case was found" in page.locator("#panel").inner_text()


def test_a_memory_that_only_predicts(chromium: Browser, tmp_path: Path) -> None:
    tokens = [replace(before(0.1, share), effects=()) for share in (0.1, 0.9, 0.1)]
    Explanation((), (tuple(tokens),)).save(tmp_path / "page.html")
    with look_at(chromium, tmp_path / "page.html") as page:
        assert "only predicts next tokens" in page.locator("main").inner_text()
        assert "9.0 times likelier" in page.locator("#panel").inner_text()
        assert page.locator(".map:visible, .switch:visible").count() == 0
        page.locator(".text .t").first.focus()
        for key in ("ArrowRight", "ArrowUp", "ArrowDown", "Escape"):
            page.keyboard.press(key)


def map_colours(page: Tab) -> list[str]:
    """The colours of the heat map, row after row."""
    fills: list[str] = page.locator(CELLS).evaluate_all(
        "rects => rects.map(rect => getComputedStyle(rect).fill)"
    )
    return fills


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_opens_on_a_telling_token(
    width: int, scheme: str, explanation: Explanation, page_file: Path, chromium: Browser
) -> None:
    opens = find_telling(explanation.tokens)
    following = explanation.tokens[opens - 1].following
    assert following is not None
    with look_at(chromium, page_file, width, scheme) as page:
        page.wait_for_selector(".map rect")
        assert_everything_fits(page)
        panel = page.locator("#panel")
        assert panel.is_visible()
        assert "shown" in (page.locator(".text .t").nth(opens).get_attribute("class") or "")
        assert following.text.strip() in panel.locator(".token").inner_text()
        assert "likelier" in panel.inner_text()
        rows = len(explanation.layers)
        assert page.locator(CELLS).count() == len(explanation.tokens) * (rows + 1) - 1
        page.locator(".text .t").nth(4).click()
        assert_everything_fits(page)
        assert page.locator("#panel").is_visible()


def test_the_map_switches_between_confidence_and_experts(
    explanation: Explanation, page_file: Path, chromium: Browser
) -> None:
    with look_at(chromium, page_file) as page:
        page.wait_for_selector(".map rect")
        confidence = map_colours(page)
        page.get_by_label("experts changed").check()
        changed = map_colours(page)
        assert confidence != changed
        assert page.locator(".scale:visible").get_attribute("data-of") == "changed"
        cells = [effect for token in explanation.tokens for effect in token.effects]
        coloured = len(changed) - changed.count(min(changed, key=lambda one: -changed.count(one)))
        assert coloured >= sum(effect.changed for effect in cells) > 0
        page.get_by_label("confidence").check()
        assert map_colours(page) == confidence


def test_a_token_shows_all_its_cases_with_their_weights(
    explanation: Explanation, page_file: Path, chromium: Browser
) -> None:
    place = 6
    token = explanation.tokens[place - 1]
    with look_at(chromium, page_file) as page:
        page.locator(".text .t").nth(place).click()
        layers = page.locator("#panel details")
        assert layers.count() == len(explanation.layers)
        for number, effect in enumerate(token.effects):
            layer = layers.nth(number)
            if layer.get_attribute("open") is None:
                layer.locator("summary").click()
            cases = layer.locator(".cases li")
            cases.first.wait_for()
            assert cases.count() == K
            weights = [int(one.get_attribute("data-weight") or 0) for one in cases.all()]
            assert sum(weights) == pytest.approx(10_000, abs=K)
            nearest = cases.first.inner_text()
            assert effect.cases[0].token.strip() in nearest
            assert f"example {effect.cases[0].example}" in nearest
            shown = re.findall(r" λ (\S+)", layer.locator("summary").inner_text())
            assert float(shown[0]) == pytest.approx(effect.confidence, abs=0.0056)
        expected = page.locator("#panel .expected ol")
        assert [runs.locator("li").count() for runs in expected.all()] == [5, 5]


def test_a_cell_chooses_its_layer_and_stays(
    explanation: Explanation, page_file: Path, chromium: Browser
) -> None:
    with look_at(chromium, page_file) as page:
        page.wait_for_selector(".map rect")
        per_token = len(explanation.layers) + 1
        page.locator(CELLS).nth(3 * per_token + 1 + 2).click()  # token 4, third layer
        opened = page.locator("#panel details[open] summary")
        assert opened.count() == 1
        assert opened.inner_text().startswith(f"Layer {explanation.layers[2]} ")
        column, at = page.locator(".map .column").bounding_box(), page.locator(".map .at")
        assert column is not None
        assert column["height"] > 16 * (per_token - 1)
        assert at.count() == 1
        # The token stays while the pointer moves on, and the layer stays for other tokens.
        page.locator(".text .t").nth(2).hover()
        assert "kept" in (page.locator(".text .t").nth(4).get_attribute("class") or "")
        page.locator(".text .t").nth(2).click()
        assert opened.inner_text().startswith(f"Layer {explanation.layers[2]} ")


def test_the_keyboard(explanation: Explanation, page_file: Path, chromium: Browser) -> None:
    opens = find_telling(explanation.tokens)

    def chosen(page: Tab) -> list[int]:
        places: list[int] = page.locator(".text .t").evaluate_all(
            "tokens => tokens.flatMap((one, i) => one.classList.contains('shown') ? [i] : [])"
        )
        return places

    with look_at(chromium, page_file) as page:
        page.wait_for_selector(".map rect")
        assert chosen(page) == [opens]
        page.locator(".text .t[tabindex='0']").focus()
        page.keyboard.press("ArrowLeft")
        assert chosen(page) == [opens - 1]
        page.keyboard.press("End")
        assert chosen(page) == [len(explanation.tokens)]
        assert "What may come next" in page.locator("#panel").inner_text()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        assert chosen(page) == [1]
        page.locator(".map svg").focus()
        page.keyboard.press("ArrowRight")
        assert chosen(page) == [2]
        first = page.locator("#panel details[open] summary").inner_text()
        for _ in explanation.layers:
            page.keyboard.press("ArrowUp")
        layer = explanation.layers[0]
        opened = page.locator("#panel details[open] summary").inner_text()
        assert opened.startswith(f"Layer {layer} "), first
        page.keyboard.press("Escape")
        assert chosen(page) == []


@pytest.mark.parametrize("layers", [1, 17, 48])
def test_the_labels_of_many_layers_are_apart(
    layers: int, chromium: Browser, tmp_path: Path
) -> None:
    token = replace(before(0.1, 0.2), effects=make_token("a", layers).effects)
    Explanation(tuple(range(layers)), ((token,) * 300,)).save(tmp_path / "page.html")
    with look_at(chromium, tmp_path / "page.html") as page:
        page.wait_for_selector(CELLS)
        assert_labels_are_apart(page)
        assert_everything_fits(page)


def test_the_map_scrolls_to_the_token(chromium: Browser, tmp_path: Path) -> None:
    tokens = (*(before(0.5, 0.5) for _ in range(280)), before(0.1, 0.9), before(0.5, 0.5))
    Explanation((0,), (tokens,)).save(tmp_path / "page.html")
    inside = """() => {
      const [box, column] = [".map", ".map .column"].map((one) => document.querySelector(one));
      if (!column) return false;
      const [outer, inner] = [box, column].map((one) => one.getBoundingClientRect());
      return box.scrollLeft > 0 && inner.left >= outer.left && inner.right <= outer.right;
    }"""
    with look_at(chromium, tmp_path / "page.html", 390) as page:
        page.wait_for_function(inside)
        page.get_by_label("experts changed").check()
        page.wait_for_function(inside)


def test_without_scripts_the_text_is_there(page_file: Path, chromium: Browser) -> None:
    with look_at(chromium, page_file, script=False) as page:
        assert "need JavaScript" in page.locator("main").inner_text()
        assert "fever" in page.locator(".text").inner_text()


def test_every_text_has_its_map(
    explanation: Explanation, chromium: Browser, tmp_path: Path
) -> None:
    tokens = explanation.tokens
    three = replace(explanation, sequences=(tokens[:8], (), tokens[2:9], tokens[:1]))
    three.save(tmp_path / "page.html")
    with look_at(chromium, tmp_path / "page.html", 390) as page:
        page.wait_for_selector(".map rect")
        assert page.locator(".map svg").count() == 3
        assert_everything_fits(page)
