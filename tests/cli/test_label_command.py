"""`knn-moe label`: a file of prompts becomes a reference set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from helpers.commands import assert_refused, run_cli
from helpers.labelling import KEY, PROMPTS, serve_endpoint, write_prompts
from knn_moe import load_examples


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


def run_label(prompts: Path, output: Path, *options: object) -> Result:
    quick = ("--max-new-tokens", 8, "--device", "cpu")
    return run_cli("label", "tiny-olmoe", prompts, "-o", output, *quick, *options)


@pytest.mark.slow
def test_the_output_is_a_reference_set(prompts_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "reference.jsonl"
    result = run_label(prompts_file, output)
    assert result.exit_code == 0, result.output
    assert "Kept 3 of 6 prompts" in result.stdout
    assert "Scores by confidence: -" in result.stdout
    examples = load_examples(output)
    assert len(examples) == 3
    assert {example.prompt for example in examples} < set(PROMPTS)
    assert all(example.completion for example in examples)
    assert_refused(run_label(prompts_file, output), "already exists")
    options = ("--by", "agreement", "--samples", 4, "--threshold", 0.25, "--overwrite", "--json")
    facts = json.loads(run_label(prompts_file, output, *options).stdout)
    assert (facts["prompts"], facts["kept"], facts["by"]) == (6, 6, "agreement")
    assert facts["scores"]["least"] >= 0.25
    assert len(load_examples(output)) == 6


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--by", "judge"), "--judge URL go together"),
        (("--judge", "http://h"), "Give both"),
        (("--keep", "2"), "keep must be"),
        (("--threshold", "0"), "No answer was kept"),
        (("--chat",), "no chat template"),
    ],
)
def test_a_refusal_leaves_no_file(
    options: tuple[str, ...], error: str, prompts_file: Path, tmp_path: Path
) -> None:
    assert_refused(run_label(prompts_file, tmp_path / "r.jsonl", *options), error)
    assert list(tmp_path.iterdir()) == [prompts_file]


@pytest.mark.parametrize(
    ("text", "output", "error"),
    [
        ("", "r.jsonl", "is empty"),
        ('{"a": 1}', "r.jsonl", "line 1: needs"),
        ('"a"\n', "r.txt", "-o must name a .jsonl file"),
        ('"a"\n', "nowhere/r.jsonl", "There is no folder"),
    ],
)
def test_bad_files_are_refused_before_the_model_loads(
    text: str, output: str, error: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    assert_refused(run_cli("label", "no/model", path, "-o", tmp_path / output), error)


@pytest.mark.slow
def test_a_judge_behind_an_endpoint(
    prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    output = tmp_path / "reference.jsonl"
    with serve_endpoint() as endpoint:
        judge = ("--judge", endpoint.url, "--judge-model", "judge-1")
        endpoint.replies = [(200, "9"), (200, "no idea"), (200, "4")]
        result = run_label(prompts_file, output, *judge)
        assert result.exit_code == 0, result.output
        assert "Kept 1 of 6 prompts (no score for 1)" in result.stdout
        assert KEY not in result.output + output.read_text()
        # The same command asks only for what is missing.
        again = tmp_path / "again.jsonl"
        endpoint.requests.clear()
        endpoint.replies = [(200, "9"), (200, "8"), (400, b"too many")]
        assert_refused(run_label(prompts_file, again, *judge), "too many")
        assert len((tmp_path / "again.jsonl.verdicts").read_text().splitlines()) == 2
        endpoint.replies = [(200, "0")]
        assert run_label(prompts_file, again, *judge).exit_code == 0
        assert len(endpoint.requests) == 3 + 4
        assert len(again.read_text().splitlines()) == 2
        again.unlink()
        endpoint.replies = [(400, b"no such model")]
        before = output.read_text()
        assert_refused(run_label(prompts_file, output, *judge, "--overwrite"), "no such model")
    assert output.read_text() == before
    assert sorted(tmp_path.iterdir()) == [prompts_file, output]
