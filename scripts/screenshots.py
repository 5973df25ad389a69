"""Make the pictures of the pages in docs/pages: the demo, an evaluation, an explanation and the
playground.

Run it with `make screenshots`. It runs the commands that write these pages, on an embedded model
and Python's documentation, and looks at them in Chromium. It takes about ten minutes on two cores.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final, NamedTuple

from playwright.sync_api import Browser, sync_playwright

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pages"
_EXPLAIN: Final = ["explain", "tiny-olmoe", "--memory", "demo/calibrated", "-o", "explanation.html"]
_COMMAND: Final = Path(sys.executable).with_name("knn-moe")
_WIDTH, _HEIGHT = 1400, 1050


class Picture(NamedTuple):
    """A part of a page: what is scrolled to the top of the window, the task shown, the colours."""

    name: str
    page: Path
    top: str = "body"  # a CSS selector
    task: str | None = None
    scheme: str = "light"


def write_tasks(folder: Path) -> None:
    """Write two tasks with their reference sets.

    `documentation` is text; `sentences` asks which of four ends belongs to a beginning.
    """
    pages = sorted(topics.values())
    halves = [*{part[0]: part for text in pages for part in _sentences(text)}.values()]
    draw = random.Random(0)
    draw.shuffle(pages)
    draw.shuffle(halves)
    for ending, start in (("_ref", 0), ("", 1)):
        texts = [{"text": text[:2000]} for text in pages[start::2]]
        _write(folder / f"documentation{ending}.jsonl", texts)
        chosen = halves[start::2]
        questions = []
        for beginning, end in chosen:
            choices = draw.sample([other for _, other in chosen if other != end], 3)
            answer = draw.randrange(4)
            choices.insert(answer, end)
            questions.append({"question": beginning, "choices": choices, "answer": answer})
        _write(folder / f"sentences{ending}.jsonl", questions)


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def _sentences(text: str) -> list[tuple[str, str]]:
    """Return the beginnings and ends of the paragraphs that are no programs."""
    found = (part.split() for part in text.split("\n\n") if part[:1].isalpha())
    return [(" ".join(part[:16]), " ".join(part[16:32])) for part in found if len(part) >= 32]


def make_pages(folder: Path) -> list[Picture]:
    """Run the commands that write the three pages."""
    write_tasks(folder)
    tasks = "-t documentation.jsonl -t sentences.jsonl"
    methods = "-m zero-shot -m knn-calibrated+head -m knn-lm -m sft-router"
    for arguments in (
        "demo --out demo",
        f"eval tiny-olmoe {tasks} {methods} -o runs",
        "report runs -o report.html",
    ):
        _knn_moe(folder, *arguments.split())
    passage = topics["if"][:700]  # which the demo tests on
    _knn_moe(folder, *_EXPLAIN, passage)
    return [
        Picture("demo", folder / "demo" / "report.html", top="#passages"),
        Picture("evaluation", folder / "report.html"),
        Picture("questions", folder / "report.html", top="#samples", task="sentences"),
        Picture("explanation", folder / "explanation.html", scheme="dark"),
    ]


def _knn_moe(folder: Path, *arguments: str) -> None:
    subprocess.run([_COMMAND, *arguments], cwd=folder, check=True)


@contextmanager
def serve(memory: Path) -> Iterator[str]:
    """Serve an embedded model with the demo's memory, and give the address of the playground."""
    arguments = [
        _COMMAND, "serve", "tiny-olmoe", "--port", "0", "--dtype", "float32",
        "--memory", f"python={memory}",
    ]  # fmt: skip
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = (re.search(r"in a browser: (\S+)", line) for line in process.stderr)
            yield next(found[1] for found in lines if found)
        finally:
            process.terminate()


def take_playground(browser: Browser, address: str) -> None:
    """Let the model and the memory answer, choose a telling token, and write the picture."""
    context = browser.new_context(viewport={"width": _WIDTH, "height": _HEIGHT})
    page = context.new_page()
    page.emulate_media(reduced_motion="reduce")
    page.goto(f"{address}?prompt=The list method")
    page.locator("[name=prompt]").press("Control+Enter")
    page.locator(".summary").wait_for()
    page.locator(".answer .up-4").first.click()
    page.locator("#panel .layer").first.wait_for()
    page.locator("#ask").evaluate("(part) => part.scrollIntoView()")
    page.screenshot(path=FOLDER / "playground.png")
    context.close()


def take(browser: Browser, picture: Picture) -> None:
    """Write the picture to docs/pages."""
    context = browser.new_context(
        viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme=picture.scheme
    )
    page = context.new_page()
    page.goto(picture.page.as_uri())
    if picture.task:
        page.locator("#viewer select[name=task]").select_option(label=picture.task)
    page.locator(picture.top).first.evaluate("(part) => part.scrollIntoView({behavior: 'instant'})")
    page.screenshot(path=FOLDER / f"{picture.name}.png")
    context.close()


def main() -> None:
    """Make the pages in a scratch folder and take their pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        pictures = make_pages(Path(scratch))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for picture in pictures:
            take(browser, picture)
        with serve(Path(scratch) / "demo" / "calibrated") as address:
            take_playground(browser, address)
        browser.close()


if __name__ == "__main__":
    main()
