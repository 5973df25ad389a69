"""Every Python snippet of the documentation runs as it stands, in order within its page.

The quickstart and the README have tests of their own. A snippet that needs what is not here is
marked on the page, `<!-- not run: the reason -->` just above it, and counts as skipped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

import knn_moe
import knn_moe.errors
from helpers.tiny import trained, words
from knn_moe import build_memory

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("quickstart.md", "README.md")
SNIPPET = re.compile(r"(?ms)(?:<!-- not run: (.*?) -->\n+)?^```python\n(.*?)^```$")
FENCE = re.compile(r"(?m)^\s*(?:```|~~~)\s*(?:py|python|pycon|ipython)\w*")


class Snippet(NamedTuple):
    """A snippet of a page, and why it is not run, if so."""

    page: str
    line: int
    code: str
    reason: str


def snippets_of(text: str, page: str) -> list[Snippet]:
    return [
        Snippet(page, text[: found.start(2)].count("\n") + 1, found[2], found[1] or "")
        for found in SNIPPET.finditer(text)
    ]


PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ELSEWHERE]
SNIPPETS = {path.name: snippets_of(path.read_text(encoding="utf8"), path.name) for path in PAGES}
RUN = [page for page, found in SNIPPETS.items() if any(not one.reason for one in found)]
NOT_RUN = [one for found in SNIPPETS.values() for one in found if one.reason]


def play(snippets: list[Snippet]) -> None:
    """Run snippets in one namespace; the lines of errors are those of the page."""
    namespace = {"__name__": "__main__"}
    for snippet in snippets:
        if not snippet.reason:
            code = "\n" * (snippet.line - 1) + snippet.code
            exec(compile(code, snippet.page, "exec"), namespace)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_snippets_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    play(SNIPPETS[page])


def test_snippets_that_cannot_run_here_say_why() -> None:
    reasons = [f"{one.page}, line {one.line}: {one.reason}" for one in NOT_RUN]
    for snippet in NOT_RUN:
        compile(snippet.code, snippet.page, "exec")
    if reasons:
        pytest.skip("; ".join(reasons))


def test_the_snippets_are_found() -> None:
    """Each fence with Python in it is one that this test sees."""
    for path in PAGES:
        fences = FENCE.findall(path.read_text(encoding="utf8"))
        assert len(fences) == len(SNIPPETS[path.name]), path.name
    assert {"calibration.md", "evaluation.md", "memories.md", "performance.md"} <= set(RUN)
    text = "<!-- not run: a GPU -->\n```python\n1\n```\n\n```python\n1 / 0\n```\n"
    first, second = snippets_of(text, "page.md")
    assert (first.reason, first.code, second.reason, second.line) == ("a GPU", "1\n", "", 7)
    with pytest.raises(ZeroDivisionError):
        play([first, second])


def test_the_names_that_pages_mention_are_there() -> None:
    """What looks like a config or an error in prose can be imported, from where api.md says."""
    for path in [*PAGES, *(ROOT / "docs" / name for name in ELSEWHERE if name != "README.md")]:
        prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf8"), flags=re.DOTALL)
        for name in re.findall(r"`([A-Z]\w+(?:Config|Error))\b", prose):
            if name != "Mxfp4Config":  # of transformers
                assert name in knn_moe.__all__ or hasattr(knn_moe.errors, name), (path.name, name)


@pytest.mark.slow
def test_the_snippet_of_a_memorys_card_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = trained("tiny-olmoe"), words()
    build_memory(model, tokenizer, ["Fever is a raised temperature."], folder="memory")
    card = Path("memory", "README.md").read_text(encoding="utf8")
    found = snippets_of(card.replace("REPO_OR_FOLDER", "memory"), "README.md")
    assert len(found) == 1
    play(found)
