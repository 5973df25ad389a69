"""What a model, a memory, a path or a token says is shown by commands and never obeyed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from helpers.commands import run_cli, save_model
from helpers.zoo import TEXTS
from knn_moe import RoutingMemory
from knn_moe.cli.main import main
from knn_moe.memory.writer import reseal
from knn_moe.support.terminal import one_line, printable, printable_json

# Markup of rich that turns text red, one that closes nothing (an error), an emoji code, a sequence
# that clears the screen, one that sets the title in a single character, and a change of direction.
HOSTILE = "[red]a[/red] [/] :boom: \x1b[2J\x9b31m\x07\u202eb"
SHOWN = "[red]a[/red] [/] :boom: �[2J�31m��b"
NAME = HOSTILE.replace("/", "")  # of a file or a folder


@pytest.fixture(scope="module")
def hostile_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose folder and whose every word are hostile."""
    folder = save_model("olmoe", tmp_path_factory.mktemp("models") / NAME)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rules = json.loads(tokenizer.to_str())
    rules["decoder"] = {"type": "Replace", "pattern": {"Regex": "^"}, "content": HOSTILE}
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return folder


@pytest.fixture(scope="module")
def hostile_memory(hostile_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory built by that model, in a hostile folder, with a hostile name in every text."""
    home = tmp_path_factory.mktemp("memories")
    reference = home / f"{NAME}.jsonl"
    reference.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    folder = home / NAME
    built = run_cli("build", hostile_model, reference, "-o", folder)
    assert built.exit_code == 0, built.output
    assert_harmless(built.output)
    opened = RoutingMemory.from_pretrained(folder)
    identity = replace(opened.base_model, architecture=HOSTILE, revision=HOSTILE)
    manifest = replace(opened.manifest, base_model=identity, libraries={HOSTILE: HOSTILE})
    reseal(folder, manifest)
    return folder


def assert_harmless(output: str) -> None:
    """Check that nothing in `output` is a command to a terminal."""
    assert not set(output) & set("\x1b\x9b\x07\u202e"), output


def test_inspect(hostile_memory: Path) -> None:
    shown = run_cli("inspect", hostile_memory)
    assert shown.exit_code == 0, shown.output
    assert_harmless(shown.output)
    assert shown.output.count(SHOWN) >= 4
    told = run_cli("inspect", hostile_memory, "--json")
    assert_harmless(told.output)
    assert json.loads(told.output)["base_model"]["revision"] == HOSTILE


def test_explain_and_generate(hostile_model: Path, hostile_memory: Path) -> None:
    for command in ("explain", "generate"):
        shown = run_cli(command, hostile_model, "5 6 7", "--memory", hostile_memory)
        assert shown.exit_code == 0, shown.output
        assert_harmless(shown.output)
        assert "[red]a" in shown.output


def test_chat(hostile_model: Path, hostile_memory: Path) -> None:
    lines = f"5 6\n/explain\n/compare\n7\n/memory\n/memory {HOSTILE}\n/{HOSTILE}\n"
    command = ["chat", str(hostile_model), "--memory", str(hostile_memory)]
    shown = CliRunner().invoke(main, [*command, "--max-new-tokens", "3"], input=lines)
    assert shown.exit_code == 0, shown.output
    assert_harmless(shown.output)
    assert "[red]a" in shown.stdout
    assert shown.stderr.count("[red]a") >= 3


def test_other_commands(hostile_model: Path, hostile_memory: Path, tmp_path: Path) -> None:
    small = tmp_path / NAME
    commands = [
        ("routers", hostile_model),
        ("compress", hostile_memory, "-o", small),
        ("merge", hostile_memory, "-o", tmp_path / "merged"),
        ("drop", hostile_memory, "--example", 0, "-o", tmp_path / "dropped"),
        ("prune", hostile_memory, "--keep", 0.5, "--by", "chance", "-o", tmp_path / "pruned"),
    ]
    for command in commands:
        shown = run_cli(*command)
        assert shown.exit_code == 0, shown.output
        assert_harmless(shown.output)


def test_errors(hostile_memory: Path, saved_model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(hostile_memory, tmp_path / NAME)
    (broken / "memory_config.json").write_text("{}")
    for command in (
        ("inspect", broken),
        ("inspect", tmp_path / f"{NAME}2"),
        ("explain", saved_model, "5 6", "--memory", hostile_memory, "-o", f"{NAME}/x.html"),
        ("routers", f"./{HOSTILE}"),
        (HOSTILE,),
        ("inspect", hostile_memory, f"--{HOSTILE}"),
    ):
        refused = run_cli(*command)
        assert refused.exit_code == 2, refused.output
        assert_harmless(refused.output)


@given(st.text())
def test_text_of_any_kind(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert all(letter >= " " or letter in "\n\t" for letter in shown)
    assert not set(one_line(text)) & set("\n\t\r")
    shown.encode("utf8")
    escaped = printable_json(json.dumps(text, ensure_ascii=False))
    assert json.loads(escaped) == text
    assert escaped == printable(escaped)


def test_words_of_any_script_stay() -> None:
    text = "naïve 日本語\u3000한국어 नमस्\u200dते 👩\u200d🚀\xa0§\n\tend"
    assert printable(text) == text
