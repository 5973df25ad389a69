"""`knn-moe demo`: what it leaves behind, and how it answers wrong calls."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import AutoTokenizer

from knn_moe import RoutingMemory
from knn_moe.cli.main import main
from knn_moe.demo.texts import (
    DemoText,
    documentation,
    sample_reference,
)
from knn_moe.support.embedded_models import embedded_model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe"))


@pytest.fixture(scope="module")
def text() -> DemoText:
    return documentation()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, text: DemoText) -> Path:
    """A folder with little text of one's own: reference.jsonl and test.jsonl."""
    folder = tmp_path_factory.mktemp("files")
    for name, examples, tokens in (
        ("reference", text.reference, 900),
        ("test", text.test, 600),
    ):
        pieces = sample_reference(examples, tokenizer, 4 * tokens)
        lines = [json.dumps({"text": piece.completion[:400]}) + "\n" for piece in pieces]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def run_demo(files: Path, out: Path, *options: object, **texts: Path) -> Result:
    reference = texts.get("reference", files / "reference.jsonl")
    test = texts.get("test", files / "test.jsonl")
    arguments = ("demo", "--reference", reference, "--test", test, "--out", out, *options)
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def assert_refused(result: Result, says: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    error = result.stderr.rpartition("Error: ")[2].strip()
    assert says in error
    assert "\n" not in error
    assert "Traceback" not in result.stderr


def test_the_command_leaves_a_result_and_a_report(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "demo"
    result = run_demo(files, out, "--tokens", 400, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert json.loads((out / "result.json").read_text()) == shown
    assert (shown["reference"], shown["test"]) == ("'reference.jsonl'", "'test.jsonl'")
    assert shown["model"] == "tiny-olmoe"
    assert 400 <= shown["reference_tokens"] < 900
    for preset in ("paper", "strong"):
        assert len(RoutingMemory.from_pretrained(out / preset)) == shown["reference_tokens"]
    report = (out / "report.html").read_text()
    assert "tiny-olmoe" in report
    assert f"{math.exp(shown['scores'][0]['nll']):.2f}" in report
    assert [path.name for path in out.parent.iterdir()] == ["demo"]

    # A second run takes the place of the first, and prints for people.
    again = run_demo(files, out, "--tokens", 1)
    assert again.exit_code == 0, again.output
    assert "zero-shot" in again.stdout
    assert str(out / "report.html") in again.stdout.replace("\n", "")
    second = json.loads((out / "result.json").read_text())
    assert second["reference_tokens"] < shown["reference_tokens"]
    assert second["scores"][0] == shown["scores"][0]
    assert [path.name for path in out.parent.iterdir()] == ["demo"]

    # But not if somebody has put a file there.
    (out / "notes.md").write_text("mine")
    assert_refused(run_demo(files, out), "holds something else than a demo")
    assert json.loads((out / "result.json").read_text()) == second


def test_a_folder_of_something_else_is_left_alone(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.md").write_text("Long ago")
    assert_refused(run_demo(files, out), "holds something else than a demo")
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "chapter.md"]
    assert (out / "chapter.md").read_text() == "Long ago"
    assert_refused(run_demo(files, out / "chapter.md"), "holds something else than a demo")
    assert (out / "chapter.md").read_text() == "Long ago"


def test_a_folder_that_only_looks_like_a_demo_is_left_alone(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    (out / "paper").mkdir(parents=True)
    (out / "paper" / "thesis.tex").write_text("Long ago")
    assert_refused(run_demo(files, out), "holds something else than a demo")
    (out / "result.json").write_text("{}")
    assert_refused(run_demo(files, out), "holds something else than a demo")
    assert (out / "paper" / "thesis.tex").read_text() == "Long ago"


def test_a_place_that_cannot_be_made(files: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(run_demo(files, tmp_path / "file" / "out"), "is no folder")


def test_what_is_tried_must_not_be_what_is_remembered(files: Path, tmp_path: Path) -> None:
    result = run_demo(files, tmp_path / "out", reference=files / "test.jsonl")
    assert_refused(result, "what is tried must not be what is remembered")


def test_a_name_that_is_almost_an_embedded_one(files: Path, tmp_path: Path) -> None:
    result = run_demo(files, tmp_path / "out", "--model", "tiny-qwen")
    assert_refused(result, "Did you mean 'tiny-qwen3'?")


def test_both_files_are_needed(files: Path, tmp_path: Path) -> None:
    for given, missing in (("reference", "--test"), ("test", "--reference")):
        options = (f"--{given}", str(files / f"{given}.jsonl"), "--out", str(tmp_path / "out"))
        result = CliRunner().invoke(main, ["demo", *options])
        assert_refused(result, f"{missing} is missing")
    assert list(tmp_path.iterdir()) == []


def broken_line(folder: Path) -> Path:
    path = folder / "broken.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n')
    return path


def empty(folder: Path) -> Path:
    path = folder / "empty.txt"
    path.write_text("\n")
    return path


def short(folder: Path) -> Path:
    path = folder / "short.txt"
    path.write_text("Too short to say anything of.")
    return path


@pytest.mark.parametrize(
    ("which", "make", "says"),
    [
        ("reference", broken_line, "line 2: not JSON"),
        ("test", broken_line, "line 2: not JSON"),
        ("reference", lambda folder: folder / "none.jsonl", "No file of examples"),
        ("test", empty, "is empty"),
        ("test", short, "the demo needs at least 512"),
    ],
)
def test_a_bad_file_leaves_nothing_behind(
    which: str, make: Callable[[Path], Path], says: str, files: Path, tmp_path: Path
) -> None:
    path = make(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert_refused(run_demo(files, tmp_path / "out", **{which: path}), says)
    assert sorted(tmp_path.iterdir()) == before


def test_a_failure_leaves_an_earlier_demo_as_it_was(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "result.json").write_text("{}")
    assert_refused(run_demo(files, out, test=short(tmp_path)), "the demo needs at least 512")
    assert (out / "result.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "short.txt"]


def test_no_such_model(files: Path, tmp_path: Path) -> None:
    result = run_demo(files, tmp_path / "out", "--model", tmp_path / "nowhere")
    assert_refused(result, "Cannot load a causal language model")
    assert list(tmp_path.iterdir()) == []
