"""Tables fit the terminal: text is broken between words, columns are stacked, nothing is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from helpers.commands import run_cli
from helpers.made_runs import generated_run, likely_run, make_run, write_runs
from knn_moe.cli.tables import print_table

LONG = "knn-calibrated+knn-lm-shuffled-by-seed"
COLUMNS = ("task", "method", "of the right answer", "95 % interval", "p", "what it means")
ROWS = [
    ("arc_challenge", LONG, "1,234.5", "+21.63 to +45.04", "0.0123", "It helps, and by chance"),
    ("mmlu", "zero-shot", "-", "-", "-", "日本語 is wide: two places for a letter"),
]


def words_of(output: str) -> set[str]:
    return set(output.replace("│", " ").replace("┃", " ").split())


@pytest.mark.parametrize("width", [200, 120, 80, 60, 51])
def test_every_word_is_there_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table("A title that may be as long as it likes", COLUMNS, ROWS)
    output = capsys.readouterr().out
    title, *lines = output.splitlines()
    assert title.startswith("A title")
    assert max(map(cell_len, lines)) <= max(width, len(LONG) + 31)
    shown = words_of(output)
    for text in (*COLUMNS, *(cell for row in ROWS for cell in row)):
        assert shown.issuperset(text.split()), text
    assert "+21.63 to +45.04" in output  # numbers are not broken
    assert width in (120, 80) or ("│" in output) == (width == 200)


def test_without_a_terminal_lines_are_as_long_as_they_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(None, COLUMNS, [(*ROWS[0][:-1], "word " * 200)])
    assert sum("word" in line for line in capsys.readouterr().out.splitlines()) == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    counts = [4] * 60
    return write_runs(
        tmp_path_factory.mktemp("runs"),
        [
            generated_run("zero-shot", 0, 60, task="commonsenseqa"),
            generated_run(LONG, 30, 6, task="commonsenseqa"),
            likely_run("zero-shot", [1.0] * 30 + [0.0] * 30, counts, "arc_challenge"),
            likely_run(LONG, [1.0] * 50 + [0.0] * 10, counts, "arc_challenge"),
            make_run("zero-shot", [0.25] * 60, "words", scoring="text"),
            make_run(LONG, [0.5] * 60, "words", scoring="text"),
        ],
    )


def assert_fits(monkeypatch: pytest.MonkeyPatch, *command: object) -> str:
    """Check that what a command shows in 80 columns has the words it has without a limit."""
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = run_cli(*command)
    monkeypatch.setenv("COLUMNS", "80")
    shown = run_cli(*command)
    assert (whole.exit_code, shown.exit_code) == (0, 0)
    assert max(map(cell_len, shown.stdout.splitlines())) <= 80
    assert words_of(shown.stdout) >= {word for word in words_of(whole.stdout) if len(word) < 60}
    return shown.stdout


def test_compare_in_eighty_columns(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = assert_fits(monkeypatch, "compare", runs, "--resamples", 500)
    assert "is not judged" in shown
    assert shown.count(LONG) > 6


def test_other_commands_in_eighty_columns(
    saved_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved_memory.parent)
    assert_fits(monkeypatch, "inspect", saved_memory.name)
    assert_fits(monkeypatch, "eval", "--list")
    assert_fits(monkeypatch, "reproduce", "--list")
    assert_fits(monkeypatch, "routers", "tiny-gpt-oss")
