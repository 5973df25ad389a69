"""The pages under docs/: links lead somewhere, symbols are defined, versions are those tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_architecture import RULE

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TOP_PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
# The first use of a symbol on a page names it; other words may stand between the parentheses too.
SYMBOLS = {
    "η": r"η \(step size|step size \(η\)",
    "S": r"S \(steps|steps \(S\)",
    "K": r"K \(neighbours|neighbours \(K\)",
    "γ": r"γ \(kernel width|kernel width \(γ\)",
    "λ": r"λ \(confidence|confidence \(λ\)",
}


@pytest.mark.parametrize("page", [*PAGES, *TOP_PAGES], ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf8")):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_symbols_are_defined_where_a_page_first_uses_them(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf8"), flags=re.DOTALL)
    for symbol, definition in SYMBOLS.items():
        first = re.search(rf"(?<![\w-]){symbol}(?![\w-])", text)
        if first is not None:
            around = text[max(0, first.start() - 30) : first.end() + 30]
            assert re.search(definition, around), f"{page.name} uses {symbol} undefined: {around!r}"


def test_prose_has_no_number_that_goes_stale() -> None:
    """No page counts the tests, and the oldest transformers is what pyproject.toml allows.

    `make test-oldest` reads that version from there.
    """
    project = (ROOT / "pyproject.toml").read_text(encoding="utf8")
    oldest = re.findall(r'"transformers>=(\d+\.\d+)"', project)
    assert len(oldest) == 1
    assert "transformers==$(OLDEST).0" in (ROOT / "Makefile").read_text(encoding="utf8")
    for page in [*PAGES, *TOP_PAGES]:
        text = page.read_text(encoding="utf8")
        assert set(re.findall(r"transformers ≥ (\d+\.\d+)", text)) <= set(oldest), page.name
        assert not re.search(r"\d[\d,]* (tests|passed)\b", text), page.name


def test_the_page_of_models_lists_every_family_that_is_tested() -> None:
    tested = re.findall(r"\w+ForCausalLM", (ROOT / "tests/helpers/families.py").read_text("utf8"))
    listed = re.findall(r"`(\w+ForCausalLM)`", (ROOT / "docs/models.md").read_text("utf8"))
    assert sorted(listed) == sorted(set(tested))


def test_the_page_of_the_architecture_has_the_import_rule_that_is_tested() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf8")
    assert RULE in " ".join(page.split())


@pytest.mark.parametrize("page", [*PAGES, *TOP_PAGES], ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf8"), flags=re.DOTALL)
    for name in re.findall(r"`([\w/-]+/[\w-]+\.(?:py|json|md))`", text):
        if not name.startswith("models/"):  # of an earlier commit
            places = (ROOT, ROOT / "src/knn_moe", ROOT / "src/knn_moe/index/fast")
            assert any((place / name).exists() for place in places), f"{page.name} names {name}"
