"""Look at a page in the machine's own Chromium, as a reader does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

WIDTHS = (390, 1400)
SCHEMES = ("light", "dark")
_OWN = ("file:", "data:", "blob:")
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

# Names what is wider than its place: the page, an SVG's text, and what a box cuts off.
_MISFITS = """() => {
  const found = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth)
    found.push(`the page is ${root.scrollWidth} px wide in a window of ${root.clientWidth} px`);
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll("text")) {
      const own = text.getBoundingClientRect();
      if (!own.width || !own.height) continue;
      const across = Math.max(box.left - own.left, own.right - box.right);
      const out = Math.max(across, box.top - own.top, own.bottom - box.bottom);
      if (out > 1) found.push(`${text.textContent} is ${out.toFixed(1)} px outside of its chart`);
    }
  }
  for (const node of document.body.querySelectorAll("*")) {
    const hides = ["hidden", "clip"].includes(getComputedStyle(node).overflowX);
    if (hides && node.clientWidth > 1 && node.scrollWidth > node.clientWidth + 1)
      found.push(`${node.tagName} ${node.className} cuts off ${node.textContent.slice(0, 40)}`);
  }
  return found;
}"""

# Names the texts of one chart that lie over each other.
_OVERLAPS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")]
      .map((text) => [text.textContent, text.getBoundingClientRect()])
      .filter(([, box]) => box.width && box.height);
    texts.forEach(([name, one], place) => {
      for (const [other, two] of texts.slice(place + 1)) {
        const across = Math.min(one.right, two.right) - Math.max(one.left, two.left);
        const down = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
        if (across > 1 && down > 4) found.push(`${name} and ${other} lie over each other`);
      }
    });
  }
  return found;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The machine's Chromium; the test is skipped where there is none.

    It ends with the module: Playwright runs an event loop in this thread, in which other tests
    could neither start their own nor be interrupted.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed.")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("There is no Chromium. Install one, or name it in the variable CHROMIUM.")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def look_at(
    browser: Browser,
    place: Path | str,
    width: int = 1400,
    scheme: str = "light",
    *,
    script: bool = True,
    may_fail: bool = False,
) -> Iterator[Page]:
    """Open a page, and fail on errors in its scripts and on anything it asks others for.

    Args:
        place: Its file, or its address on a server.
        width: Of the window, in pixels.
        scheme: "light" or "dark".
        script: Whether JavaScript runs.
        may_fail: Whether the server may answer with errors.
    """
    address = place if isinstance(place, str) else place.resolve().as_uri()
    own = (*_OWN, address.partition("?")[0]) if isinstance(place, str) else _OWN
    wrong: list[str] = []

    def hear(said: ConsoleMessage) -> None:
        forgiven = may_fail and said.text.startswith("Failed to load resource")
        if said.type == "error" and not forgiven:
            wrong.append(said.text)

    height = 844 if width < 600 else 900
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]  # one of SCHEMES
        java_script_enabled=script,
    )
    page = context.new_page()
    page.on("console", hear)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda asked: None if asked.url.startswith(own) else wrong.append(asked.url),
    )
    try:
        page.goto(address)
        yield page
        if script:
            page.evaluate("() => new Promise(requestAnimationFrame)")  # what is pending is drawn
        assert not wrong, wrong
    finally:
        context.close()


def assert_everything_fits(page: Page) -> None:
    """Check that the page does not scroll sideways, and that nothing on it is cut off."""
    _settle(page)
    found = page.evaluate(_MISFITS)
    assert not found, found


def assert_labels_are_apart(page: Page) -> None:
    """Check that no label of a chart lies over another."""
    _settle(page)
    found = page.evaluate(_OVERLAPS)
    assert not found, found


def _settle(page: Page) -> None:
    """Wait for charts, which are drawn once their width is known."""
    if page.locator(".chart").count():
        page.wait_for_function(
            "() => [...document.querySelectorAll('.chart')]"
            ".every((box) => !box.clientWidth || box.childElementCount)"
        )
