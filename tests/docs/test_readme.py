"""The README: short enough to read in a minute, and its examples run as they stand."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from helpers.commands import run_cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf8")
BEFORE_THE_LINKS = README.split("\n## More")[0]


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_it_has_at_most_600_words_before_the_links() -> None:
    text = re.sub(r"```.*?```|<!--.*?-->", "", BEFORE_THE_LINKS, flags=re.DOTALL)
    words = [word for word in text.split() if re.search(r"[a-zA-Z]", word)]
    assert len(words) <= 600


def test_it_names_the_paper_and_its_authors() -> None:
    assert "Routing by Analogy: {kNN}-Augmented Expert Assignment for Mixture-of-Experts" in README
    for author in ("Lyu, Boxuan", "Murakami, Soichiro", "Kamigaito, Hidetaka", "Zhang, Peinan"):
        assert author in README


@pytest.mark.slow
def test_the_python_example_runs_and_the_memory_lowers_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = code_blocks("python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    without, with_memory = (float(loss) for loss in re.findall(r"memory: (\d\.\d+)", printed))
    assert with_memory < without
    assert "recalled" in Path("explanation.html").read_text(encoding="utf8")


@pytest.mark.slow
def test_the_command_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sentences = [f"Patient {n} had a fever of {38 + n % 3} degrees." for n in range(24)]
    rows = [json.dumps({"text": text}) for text in sentences]
    Path("ref.jsonl").write_text("\n".join(rows), encoding="utf8")
    lines = [line for block in code_blocks("console") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("$ knn-moe")]
    commands = [line for line in commands if " serve " not in line]  # which runs until it is ended
    assert len(commands) == 5
    for command in commands:
        result = run_cli(*shlex.split(command, comments=True)[2:])
        assert result.exit_code == 0, (command, result.output)
