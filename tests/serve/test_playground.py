"""The playground in a browser: answers side by side, tokens and their cases, and errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from transformers import PreTrainedModel

from helpers.browser import SCHEMES, WIDTHS, assert_everything_fits, look_at
from helpers.html_page import assert_self_contained
from helpers.served import Served, make_service, served, two_memories
from helpers.tiny import trained
from knn_moe import BuildConfig, RoutingMemory, build_memory
from knn_moe.serve.answering import Limits
from knn_moe.serve.playground import playground

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>"
PROMPT = "The court held that"


@pytest.fixture(scope="module")
def memories(tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any) -> dict[str, RoutingMemory]:
    """Two memories, and one whose texts would do harm as markup."""
    config = BuildConfig(learning_rate=200.0, steps=3, batch_tokens=512)
    bad = build_memory(tiny_olmoe, tiny_tokenizer, [f"{PROMPT} <img src=x>"] * 2, config)
    return {**two_memories(tiny_olmoe, tiny_tokenizer), "hostile": bad}


@contextmanager
def opened(
    browser: Browser, server: Served, width: int = 1400, scheme: str = "light", **options: Any
) -> Iterator[Page]:
    """The playground of a server, with a prompt in its form."""
    address = f"{server.url}/?prompt={PROMPT.replace(' ', '%20')}"
    with look_at(browser, address, width, scheme, **options) as page:
        page.on("dialog", lambda dialog: pytest.fail("a text ran as a script"))
        page.locator("#ask").wait_for()
        yield page


def choose(page: Page, *names: str) -> None:
    for box in page.locator("[name=model]").all():
        box.set_checked(box.get_attribute("value") in names)


def answers(page: Page, *names: str) -> list[Locator]:
    """Let the model or memories of these names answer, and wait until all is explained."""
    choose(page, *names)
    page.get_by_role("button", name="Run").click()
    for name in names:
        of = answer_of(page, name)
        of.locator(".summary" if name != "base" else ".status:has-text('tokens in')").wait_for()
    return [answer_of(page, name) for name in names]


def answer_of(page: Page, name: str) -> Locator:
    return page.get_by_role("article", name=name, exact=True)


def completed(server: Served, name: str) -> str:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    text: str = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).json()[
        "choices"
    ][0]["text"]
    return text


def test_the_page_loads_nothing_and_runs_only_its_own() -> None:
    shown = playground()
    assert_self_contained(shown.html)
    policy = shown.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "style=" not in shown.html  # which the policy would refuse


@pytest.mark.slow
def test_answers_side_by_side(chromium: Browser, server: Served) -> None:
    with opened(chromium, server) as page:
        assert page.locator("[name=model]:checked").count() == 3
        base, law, medicine = answers(page, "base", "law", "medicine")
        for name, answer in (("base", base), ("law", law), ("medicine", medicine)):
            shown = answer.locator(".text").text_content() or ""
            assert shown.strip() == f"{PROMPT}{completed(server, name)}".strip()
        assert base.locator(".t").count() == 0
        assert law.locator(".t[class*=up-], .t[class*=down-]").count() > 5
        boxes = [answer.bounding_box() for answer in (base, law, medicine)]
        tops = {round(box["y"]) for box in boxes if box}
        assert len(tops) == 1  # beside each other


@pytest.mark.slow
def test_a_token_tells_its_cases(chromium: Browser, server: Served) -> None:
    with opened(chromium, server) as page:
        (law,) = answers(page, "law")
        token = law.locator(".t[class*=up-]").first
        token.click()
        panel = page.locator("#panel")
        panel.locator(".layer").first.wait_for()
        assert panel.locator(".layer").count() == 6
        said = panel.inner_text()
        assert "likelier" in said
        assert "by law" in said
        assert re.search(r"Layer 5 λ 0\.\d\d", said)
        assert panel.locator(".layer[open] .case mark").count() == 1
        assert "experts alone" in panel.locator(".layer[open]").inner_text()
        panel.locator(".layer:not([open]) summary").first.click()
        assert panel.locator(".layer[open]").count() == 2
        panel.get_by_role("button", name="Close").click()
        assert panel.is_hidden()
        assert token.evaluate("(node) => node === document.activeElement")


@pytest.mark.slow
def test_the_keyboard_alone(chromium: Browser, server: Served) -> None:
    with opened(chromium, server) as page:
        choose(page, "law")
        page.locator("[name=prompt]").press("Control+Enter")
        law = answer_of(page, "law")
        law.locator(".summary").wait_for()
        tokens = law.locator(".t")
        while not tokens.first.evaluate("(node) => node === document.activeElement"):
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        panel = page.locator("#panel")
        panel.locator(".layer").first.wait_for()
        for place in (1, 2):
            page.keyboard.press("ArrowRight")
            assert tokens.nth(place).evaluate("(node) => node === document.activeElement")
        panel.locator(".layer").first.wait_for()
        opened_layer = panel.locator(".layer[open] summary b")
        before = opened_layer.inner_text()
        page.keyboard.press("ArrowUp")
        assert opened_layer.inner_text() == f"Layer {int(before.split()[1]) - 1}"
        page.keyboard.press("End")
        panel.get_by_text("What may come next").wait_for()
        panel.locator(".layer").first.wait_for()
        page.keyboard.press("Escape")
        assert panel.is_hidden()
        assert tokens.last.evaluate("(node) => node === document.activeElement")
        assert tokens.last.get_attribute("tabindex") == "0"
        assert law.locator(".t[tabindex='0']").count() == 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits(chromium: Browser, server: Served, width: int, scheme: str) -> None:
    with opened(chromium, server, width, scheme) as page:
        page.emulate_media(reduced_motion="reduce")  # it scrolls at once
        page.locator("details summary").first.click()
        assert_everything_fits(page)
        _, law = answers(page, "base", "law")
        assert_everything_fits(page)
        token = law.locator(".t").nth(20)
        token.click()
        panel = page.locator("#panel")
        panel.locator(".layer").first.wait_for()
        assert_everything_fits(page)
        text, over = token.bounding_box(), panel.bounding_box()
        assert text is not None
        assert over is not None
        beside = over["x"] >= text["x"] + text["width"]
        below = over["y"] >= text["y"] + text["height"]
        assert beside if width > 900 else below, "the panel covers its token"
        paper = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) > 384) == (scheme == "light")


@pytest.mark.slow
def test_colours_show_what_is_chosen(chromium: Browser, server: Served) -> None:
    with opened(chromium, server) as page:
        (law,) = answers(page, "law")
        look = "(nodes) => nodes.map((node) => getComputedStyle(node).backgroundColor)"
        seen = [law.locator(".t").evaluate_all(look)]
        for of in ("confidence", "rerouted"):
            page.locator(f"[name=tint][value={of}]").check()
            assert page.locator(f".scale[data-of={of}]").is_visible()
            assert page.locator(".key[data-of=colour]").is_hidden()
            seen.append(law.locator(".t").evaluate_all(look))
        page.locator("[name=tint][value=colour]").check()
        assert law.locator(".t").evaluate_all(look) == seen[0]
        assert len(set(map(tuple, seen))) == 3


@pytest.mark.slow
def test_hostile_text_stays_text(chromium: Browser, server: Served) -> None:
    with opened(chromium, server) as page:
        page.locator("[name=prompt]").fill(f"{HOSTILE} {PROMPT} <img")
        _, bad = answers(page, "base", "hostile")
        for name in ("base", "hostile"):
            assert HOSTILE in (answer_of(page, name).locator(".given").text_content() or "")
        bad.locator(".t").first.click()
        panel = page.locator("#panel")
        panel.locator(".layer").first.wait_for()
        while panel.locator(".layer:not([open])").count():
            panel.locator(".layer:not([open]) summary").first.click()
        recalled = " ".join(panel.locator(".case").all_text_contents())
        assert "<img" in recalled
        assert page.locator("main img, main script").count() == 0


@pytest.mark.slow
def test_what_goes_wrong_is_told(
    chromium: Browser, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(chromium, server, may_fail=True) as page:
        choose(page)
        page.get_by_role("button", name="Run").click()
        assert "Choose the model or a memory" in page.locator("#trouble").inner_text()
        choose(page, "law")
        page.locator("details summary").first.click()
        page.locator("[name=max_tokens]").fill("100000")
        page.get_by_role("button", name="Run").click()
        law = answer_of(page, "law")
        law.get_by_role("alert").wait_for()
        assert "the model reads at most" in law.get_by_role("alert").inner_text()
        page.locator("[name=max_tokens]").fill("8")
        answers(page, "law")
        assert page.get_by_role("alert").count() == 0
        monkeypatch.setattr(server.service._explaining, "_limits", Limits(explained=3))
        law.locator(".t").nth(4).click()
        page.locator("#panel").get_by_role("alert").wait_for()
        assert "explains at most 3" in page.locator("#panel").inner_text()
        page.get_by_role("button", name="Run").click()
        law.get_by_role("alert").wait_for()
        assert "explains at most 3" in law.inner_text()


@pytest.mark.slow
def test_stop_and_a_page_that_vanishes(chromium: Browser, server: Served) -> None:
    engine = server.service.engine

    def wait_until_idle() -> None:
        with engine._fewer_jobs:
            assert engine._fewer_jobs.wait_for(lambda: engine.counts() == (0, 0), timeout=60)

    with opened(chromium, server) as page:
        choose(page, "law")
        page.locator("details summary").first.click()
        page.locator("[name=max_tokens]").fill("900")
        page.locator("[name=temperature]").fill("2")
        page.get_by_role("button", name="Run").click()
        law = answer_of(page, "law")
        law.locator(".status:has-text('answering')").wait_for()
        page.get_by_role("button", name="Stop").click()
        law.locator(".summary").wait_for()
        assert "stopped" in law.locator(".status").inner_text()
        wait_until_idle()
        page.get_by_role("button", name="Run").click()
        law.locator(".status:has-text('answering')").wait_for()
    wait_until_idle()
    assert completed(server, "law")


@pytest.fixture(scope="module")
def locked(tiny_tokenizer: Any) -> Iterator[Served]:
    """A server with a key, which explains nothing."""
    model = trained("tiny-olmoe")
    law = two_memories(model, tiny_tokenizer)["law"]
    limits = Limits(explained=0)
    service = make_service(model, tiny_tokenizer, {"law": law}, api_key="secret", limits=limits)
    with served(service) as running:
        yield running


@pytest.mark.slow
def test_a_server_with_a_key(chromium: Browser, locked: Served) -> None:
    with look_at(chromium, locked.url, may_fail=True) as page:
        key = page.get_by_label("API key")
        key.fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        page.get_by_text("The server refuses this key.").wait_for()
        key.fill("secret")
        key.press("Enter")
        page.locator("#ask").wait_for()
        assert page.locator("#key, #trouble").locator("visible=true").count() == 0
        assert page.evaluate("() => [localStorage.length, document.cookie]") == [0, ""]
        page.reload()
        page.locator("[name=prompt]").fill(PROMPT)
        (law,) = answers(page, "law")
        assert "does not explain answers" in law.locator(".summary").inner_text()
        assert page.get_by_role("alert").locator("visible=true").count() == 0
    with look_at(chromium, locked.url, may_fail=True) as page:  # another tab
        page.get_by_label("API key").wait_for()


@pytest.mark.slow
def test_a_server_that_has_gone(chromium: Browser, tiny_tokenizer: Any) -> None:
    service = make_service(trained("tiny-olmoe"), tiny_tokenizer, {})
    with served(service) as running, opened(chromium, running, may_fail=True) as page:
        running.service.engine.stop()
        page.get_by_role("button", name="Run").click()
        base = answer_of(page, "base")
        base.get_by_role("alert").wait_for()
        assert "stopping" in base.inner_text()
        page.context.set_offline(True)
        page.get_by_role("button", name="Run").click()
        page.get_by_text("The server does not answer. Is it still running?").wait_for()
