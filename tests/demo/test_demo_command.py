"""`knn-moe demo`: what it writes and prints, and how it refuses bad calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from helpers.commands import assert_refused, run_cli
from knn_moe import RoutingMemory
from knn_moe.config import CalibrationConfig
from knn_moe.demo.texts import load_documentation, sample_reference


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A folder with a little text of the user's: reference.jsonl and test.jsonl."""
    folder, text = tmp_path_factory.mktemp("files"), load_documentation()
    for name, examples, pieces in (("reference", text.reference, 38), ("test", text.test, 10)):
        chosen = sample_reference(examples, tiny_tokenizer, 20_000)[:pieces]
        lines = [
            json.dumps({"text": piece.completion[: 400 if name == "test" else 250]}) + "\n"
            for piece in chosen
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def run_demo(files: Path, out: Path, *options: object, **texts: Path) -> Result:
    reference = texts.get("reference", files / "reference.jsonl")
    test = texts.get("test", files / "test.jsonl")
    return run_cli("demo", "--reference", reference, "--test", test, "--out", out, *options)


@pytest.mark.slow
def test_the_command_writes_results_and_a_report(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = CalibrationConfig(neighbours=(8,), value_rates=(0.1,), passes=1)
    monkeypatch.setattr("knn_moe.demo.demo.CALIBRATION", quick)
    out = tmp_path / "new" / "demo"
    result = run_demo(files, out, "--tokens", 10_000, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert json.loads((out / "result.json").read_text()) == shown
    assert (shown["reference"], shown["test"]) == ("'reference.jsonl'", "'test.jsonl'")
    assert shown["model"] == "tiny-olmoe"
    assert 2000 <= shown["reference_tokens"] < 10_000
    for name in ("paper", "calibrated"):
        assert len(RoutingMemory.from_pretrained(out / name)) == shown["reference_tokens"]
    methods = [found["method"] for found in shown["results"]]
    assert {path.name for path in (out / "runs" / "demo").iterdir()} == set(methods)
    report = (out / "report.html").read_text()
    assert all(f"{found['perplexity']:.2f}" in report for found in shown["results"])

    # A second demo replaces the first, and prints a table and a passage.
    again = run_demo(files, out, "--tokens", 2000)
    assert again.exit_code == 0, again.output
    assert all(method in again.stdout for method in methods)
    assert "The passage that gained most" in again.stdout
    assert str(out / "report.html") in again.stdout.replace("\n", "")
    second = json.loads((out / "result.json").read_text())
    assert second["reference_tokens"] < shown["reference_tokens"]
    assert second["results"][0]["nll"] == shown["results"][0]["nll"]
    assert [path.name for path in out.parent.iterdir()] == ["demo"]

    # It does not replace a folder into which somebody has put a file.
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


def test_a_folder_that_cannot_be_created(files: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(run_demo(files, tmp_path / "file" / "out"), "is not a folder")


def test_the_test_text_must_differ_from_the_reference(files: Path, tmp_path: Path) -> None:
    result = run_demo(files, tmp_path / "out", reference=files / "test.jsonl")
    assert_refused(result, "The test text must differ from the reference text")


def test_a_name_that_is_almost_an_embedded_one(files: Path, tmp_path: Path) -> None:
    result = run_demo(files, tmp_path / "out", "--model", "tiny-qwen")
    assert_refused(result, "Did you mean 'tiny-qwen3'?")


def test_both_files_are_needed(files: Path, tmp_path: Path) -> None:
    for given, missing in (("reference", "--test"), ("test", "--reference")):
        file = files / f"{given}.jsonl"
        result = run_cli("demo", f"--{given}", file, "--out", tmp_path / "out")
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
        ("reference", lambda folder: folder / "none.jsonl", "There is no file or folder"),
        ("test", empty, "is empty"),
        ("test", short, "tokens, fewer than a window of 256"),
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
    assert_refused(run_demo(files, out, test=short(tmp_path)), "tokens, fewer than a window of 256")
    assert (out / "result.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "short.txt"]


def test_no_such_model(files: Path, tmp_path: Path) -> None:
    result = run_demo(files, tmp_path / "out", "--model", tmp_path / "nowhere")
    assert_refused(result, "Cannot load a causal language model")
    assert list(tmp_path.iterdir()) == []
