"""MkDocs hook: make pages of the files in the repository root, and list the command pages.

README.md becomes the first page; CHANGELOG.md, CONTRIBUTING.md and experiments/README.md become
pages too, with their links rewritten. The notebook is a file to download.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "src"

_PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "experiments/README.md": "experiments.md",
}
_FILES: Final = ("examples/adapt.ipynb",)
_LINK: Final = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")


def on_config(config: Any) -> Any:
    """List the command pages in the navigation, in the order of `knn-moe --help`."""
    sys.path[:0] = [str(SOURCE), str(ROOT / "scripts")]  # MkDocs undoes what a hook's import adds
    from cli_pages import command_names

    pages = [{"Overview": "cli/index.md"}, *({name: f"cli/{name}.md"} for name in command_names())]
    for entry in config["nav"]:
        if "Commands" in entry:
            entry["Commands"] = pages
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of files outside docs/, and the files that are copied."""
    for source, page in _PAGES.items():
        text = (ROOT / source).read_text(encoding="utf8")
        files.append(File.generated(config, page, content=rewrite_links(text, Path(source).parent)))
    for name in _FILES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links of docs/*.md to files in the repository root at their pages."""
    for source, target in _PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}")
    for name in _FILES:
        markdown = markdown.replace(f"](../{name}", f"]({name}")
    return markdown


def rewrite_links(text: str, folder: Path) -> str:
    """Return `text` of a file in `folder` with links that hold from within docs/."""

    def rewrite(match: re.Match[str]) -> str:
        path = posixpath.normpath((folder / match[2]).as_posix())
        return match[1] + _PAGES.get(path, path.removeprefix("docs/")) + match[3]

    return _LINK.sub(rewrite, text)
