"""MkDocs hook: make pages of the files in the repository root, and check the API page.

README.md becomes the first page; CHANGELOG.md, CONTRIBUTING.md and experiments/README.md become
pages too, with their links rewritten. The build fails if a public name is missing from docs/api.md
or lacks a docstring.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "src"

_PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "experiments/README.md": "experiments.md",
}
_ENTRY: Final = re.compile(r"^::: (\S+)(?:\n    options: (.*))?", flags=re.MULTILINE)
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
    """Add the pages that are made of files outside docs/, and check the API page."""
    for source, page in _PAGES.items():
        text = (ROOT / source).read_text(encoding="utf8")
        files.append(File.generated(config, page, content=rewrite_links(text, Path(source).parent)))
    check_api(Path(config["docs_dir"]) / "api.md")
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links of docs/*.md to files in the repository root at their pages."""
    for source, target in _PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}")
    return markdown


def rewrite_links(text: str, folder: Path) -> str:
    """Return `text` of a file in `folder` with links that hold from within docs/."""

    def rewrite(match: re.Match[str]) -> str:
        path = (folder / match[2]).as_posix()
        return match[1] + _PAGES.get(path, path.removeprefix("docs/")) + match[3]

    return _LINK.sub(rewrite, text).replace('src="docs/', 'src="')


def check_api(page: Path) -> None:
    """Raise PluginError unless `page` has every public name, each with docstrings."""
    import griffe

    import knn_moe

    listed = dict(_ENTRY.findall(page.read_text(encoding="utf8")))
    package = griffe.load("knn_moe", search_paths=[SOURCE])
    public = [f"knn_moe.{name}" for name in knn_moe.__all__]
    public += [f"knn_moe.tasks.{name}" for name in _declared(SOURCE / "knn_moe/tasks/__init__.py")]
    problems = [f"{name} is not on {page.name}" for name in public if name not in listed]
    for name in {*public, *listed}:
        found = package[name.removeprefix("knn_moe.")]
        members = "members: false" not in listed.get(name, "")
        problems += [f"{each} has no docstring" for each in _find_undocumented(found, members)]
    if problems:
        raise PluginError("; ".join(sorted(problems)) + ".")


def _find_undocumented(found: Any, members: bool) -> list[str]:
    """Return the paths of a name and, with `members`, of its public methods without docstring."""
    paths = [] if found.has_docstring else [found.path]
    for name, member in found.all_members.items() if found.is_class and members else ():
        method = member.is_function or "property" in member.labels
        if method and not name.startswith("_") and not member.has_docstring:
            inherited = any(
                name in each.members and each[name].has_docstring for each in found.mro()
            )
            paths += [] if inherited else [member.path]
    return paths


def _declared(path: Path) -> list[str]:
    """Return `__all__` of a module that is not imported, since that would need torch."""
    for node in ast.parse(path.read_text(encoding="utf8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise PluginError(f"{path} has no __all__.")
