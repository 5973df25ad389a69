"""Write docs/cli/*.md, one page for each command, from the commands' own `--help`.

Run it with `make docs-cli`. tests/docs/test_cli_pages.py fails if the pages are out of date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from knn_moe.cli.main import main as knn_moe

FOLDER: Final = Path(__file__).parents[1] / "docs" / "cli"
_WIDTH: Final = 96
_NOTE: Final = (
    "<!-- Written by scripts/cli_pages.py from the command's --help: `make docs-cli`. -->"
)


def command_names() -> list[str]:
    """Return the commands in the order in which `knn-moe --help` lists them."""
    return list(knn_moe.list_commands(_context(knn_moe, "knn-moe")))


def make_pages() -> dict[str, str]:
    """Return the text of every page by its file name."""
    top = _context(knn_moe, "knn-moe")
    pages, rows = {}, []
    for name in command_names():
        command = knn_moe.get_command(top, name)
        if command is None:
            raise LookupError(f"knn-moe lists {name!r} and has no such command.")
        sections = [
            f"{'#' * (1 if level == 0 else 2)} {title}\n\n```text\n{text}\n```\n"
            for level, title, text in _help_texts(command, name, top)
        ]
        pages[f"{name}.md"] = "\n".join([_NOTE, *sections])
        rows.append(f"| [`knn-moe {name}`]({name}.md) | {command.get_short_help_str(limit=200)} |")
    table = "\n".join(["| command | what it does |", "|---|---|", *rows])
    pages["index.md"] = (
        f"{_NOTE}\n# Commands\n\nEvery command answers `--help`, exits with code 2 on an error "
        f"that you can correct, and prints JSON with `--json` where programs may read it.\n\n"
        f"{table}\n"
    )
    return pages


def _help_texts(
    command: click.Command, name: str, parent: click.Context, level: int = 0
) -> Iterator[tuple[int, str, str]]:
    """Yield the level, title and help of a command, then of the commands below it."""
    context = _context(command, name, parent)
    yield level, f"knn-moe {context.command_path.removeprefix('knn-moe ')}", _help(context)
    if isinstance(command, click.Group):
        for child_name in command.list_commands(context):
            child = command.get_command(context, child_name)
            if child is not None:
                yield from _help_texts(child, child_name, context, level + 1)


def _context(
    command: click.Command, name: str, parent: click.Context | None = None
) -> click.Context:
    widths: dict[str, Any] = {"terminal_width": _WIDTH, "max_content_width": _WIDTH}
    settings = {**command.context_settings, **widths}
    return click.Context(command, info_name=name, parent=parent, **settings)


def _help(context: click.Context) -> str:
    lines = context.command.get_help(context).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    """Write the pages, and delete pages of commands that are gone."""
    pages = make_pages()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in set(FOLDER.glob("*.md")) - {FOLDER / name for name in pages}:
        old.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
