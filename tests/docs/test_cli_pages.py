"""docs/cli is what the commands' --help says now."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_command_pages_are_current() -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "cli_pages.py"))["make_pages"]()
    written = {path.name: path.read_text("utf8") for path in (ROOT / "docs" / "cli").glob("*.md")}
    assert written == pages, "Run `make docs-cli`."
