"""The quickstart, played from the page: every command and every program, in a clean environment."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from helpers.clean_environment import CleanEnvironment, build_wheel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf8")
INSTALL, PLAYED = PAGE.split("\n## Prepare", 1)
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", PLAYED)
# What a reader types into a command that asks for more.
TYPED = {"chat": "The import statement\n/compare\nThe class statement\n/explain chat.html\n/quit\n"}


def commands(block: str) -> list[str]:
    """The lines after a prompt; a line that ends in a backslash goes on in the next."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def command_name(command: str) -> str:
    """The name of a command: "build" of `knn-moe build …`, and "python" of `python …`."""
    program, *arguments = command.split()
    return arguments[0] if program == "knn-moe" else program


def test_every_block_of_the_page_is_played() -> None:
    """What is in a fence is a program, a command after its prompt, or rows to look at."""
    assert PLAYED.count("```") == 2 * len(BLOCKS)
    for language, block in BLOCKS:
        assert language in ("console", "python", "json"), language
        if language == "console":
            lines = block.replace("\\\n", " ").splitlines()
            assert [line for line in lines if not line.startswith("$ ")] == []


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    return CleanEnvironment.make(tmp_path_factory.mktemp("clean"), wheel)


@pytest.mark.slow
def test_the_quickstart_plays_as_it_stands(clean: CleanEnvironment) -> None:
    """The page holds what it needs: no file is prepared here."""
    where = clean.run("python -c 'import knn_moe; print(knn_moe.__file__)'").stdout
    assert where.startswith(str(clean.folder)), where
    printed: dict[str, str] = {}
    for language, block in BLOCKS:
        program = clean.work / "program.py"
        program.write_text(block, encoding="utf8")
        for command in ["python program.py"] if language == "python" else commands(block):
            ran = clean.run(command, TYPED.get(command_name(command), ""))
            assert ran.returncode == 0, (command, block, ran.stderr)
            assert "Traceback" not in ran.stderr, (command, ran.stderr)
            printed[command_name(command)] = ran.stdout
    expected = {"routers", "build", "inspect", "generate", "explain", "chat", "compress"}
    assert expected | {"eval", "compare", "report"} <= set(printed)
    for page in ("page.html", "report.html", "chat.html"):
        assert (clean.work / page).stat().st_size > 1000, page
    assert "mean λ" in printed["python"]
    assert "shuffled" in printed["compare"]


def test_what_the_quickstart_installs_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    named = re.findall(r"\.\[(\w+)\]", INSTALL)
    assert named
    assert set(named) <= set(project["optional-dependencies"])
