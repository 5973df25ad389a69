"""Messages and help texts advise only options that the command has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import knn_moe
from knn_moe.cli.main import COMMANDS, main

ROOT = Path(knn_moe.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OF_ANY = {"--help", "--version"}
OTHER_PROGRAMS = {"--no-deps", "--model_args", "--tasks", "--root", "--wd", "--rbind"}


def options_of(command: click.Command) -> set[str]:
    """Return every option of a command, or of the commands of a group."""
    if isinstance(command, click.Group):
        return set().union(*map(options_of, command.commands.values()))
    return {option for parameter in command.params for option in parameter.opts}


OPTIONS = {name: options_of(main.get_command(click.Context(main), name)) for name in COMMANDS}
FILES = {"reproduce": ("reproduce", "pretrained")}  # the modules of a command, where it has several


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every text of a module in which words are written, with its line."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
              for part in ast.walk(node) if part is not node}  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def known_options(path: Path, text: str) -> set[str]:
    """Return the options that a text of a module may name."""
    owners = [name for name in COMMANDS if path.stem in FILES.get(name, (name,))]
    named = re.findall(rf"knn-moe ({'|'.join(COMMANDS)})\b", text)
    if path.parent.name != "cli" or not owners:
        owners = list(COMMANDS)
    return set().union(OF_ANY, OTHER_PROGRAMS, *(OPTIONS[name] for name in [*owners, *named]))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.stem)
def test_every_option_that_is_named_exists(path: Path) -> None:
    for line, text in texts(path):
        if " " in text:  # not a list of arguments of another program
            unknown = set(FLAG.findall(text)) - known_options(path, text)
            assert not unknown, f"{path.relative_to(ROOT)}:{line}: {unknown}"


def test_the_test_finds_an_option_that_is_not_there(tmp_path: Path) -> None:
    module = tmp_path / "cli" / "build.py"
    module.parent.mkdir()
    module.write_text('f"Use --append for {path}, or --judge with knn-moe label, or --fraction."')
    ((_, text),) = texts(module)
    assert set(FLAG.findall(text)) - known_options(module, text) == {"--fraction"}
