"""`knn-moe eval`, `compare` and `report`, as a user calls them."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from helpers.quiz import make_questions
from knn_moe.cli.main import main


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quiz")
    for name, rows in (("quiz", make_questions(12)), ("quiz_ref", make_questions(5, seed=1))):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf8")
    return folder / "quiz.jsonl"


@pytest.fixture(scope="module")
def runs(quiz: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both methods on one's own questions, from one command."""
    folder = tmp_path_factory.mktemp("runs")
    result = call("eval", "tiny-olmoe", "-t", str(quiz), "--scoring", "likelihood", "-o",
                  str(folder), "--batch-size", "4", "--device", "cpu")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "zero-shot" in result.stdout
    assert "knn" in result.stdout
    return folder


def test_every_sample_is_there(runs: Path) -> None:
    for method in ("zero-shot", "knn"):
        lines = (runs / "quiz" / method / "samples.jsonl").read_text(encoding="utf8").splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == 12
        assert {"id", "prompt", "score", "nll", "parsed", "likelihoods"} <= set(samples[0])
        facts = json.loads((runs / "quiz" / method / "run.json").read_text(encoding="utf8"))
        assert facts["finished"]
        assert facts["model"]["name"] == "tiny-olmoe"
        assert facts["dtype"] == "float32"


def test_going_on_uses_what_is_there(runs: Path, quiz: Path) -> None:
    asked = ["eval", "tiny-olmoe", "-t", str(quiz), "--scoring", "likelihood", "-o", str(runs)]
    again = call(*asked, "--batch-size", "4", "--device", "cpu", "--resume", "--json")
    assert again.exit_code == 0, again.output
    assert [run["method"] for run in json.loads(again.stdout)] == ["zero-shot", "knn"]
    refused = call(*asked, "--batch-size", "4", "--device", "cpu")
    assert refused.exit_code == 2
    assert "There is a run in" in refused.output


def test_another_method_uses_the_memory_that_is_there(
    runs: Path, quiz: Path, tmp_path: Path
) -> None:
    runs = shutil.copytree(runs, tmp_path / "runs")
    asked = ["eval", "tiny-olmoe", "-t", str(quiz), "--scoring", "likelihood", "-o", str(runs)]
    asked += ["--batch-size", "4", "--device", "cpu", "-m"]
    before = sorted(path.stat().st_mtime_ns for path in (runs / "quiz").glob("memory-*"))
    assert call(*asked, "knn-gated").exit_code == 0
    assert sorted(path.stat().st_mtime_ns for path in (runs / "quiz").glob("memory-*")) == before
    # What is finished is neither prepared nor asked again.
    run = runs / "quiz" / "knn-gated" / "run.json"
    written = run.stat().st_mtime_ns
    again = call(*asked, "knn-gated", "--resume", "--json")
    assert again.exit_code == 0, again.output
    assert run.stat().st_mtime_ns == written
    other = call(*asked, "knn-gated", "--resume", "--preset", "paper")
    assert other.exit_code == 2
    assert "it cannot be gone on with" in other.output


def test_writing_over_replaces_the_memory_as_well(quiz: Path, tmp_path: Path) -> None:
    asked = ["eval", "tiny-olmoe", "-t", str(quiz), "--scoring", "likelihood", "--limit", "3"]
    asked += ["--reference", "2", "-m", "knn", "-o", str(tmp_path), "--device", "cpu"]
    for more in ([], ["--overwrite"]):
        result = call(*asked, *more)
        assert result.exit_code == 0, result.output
        assert "against knn" in result.stdout
    assert call(*asked, "--resume", "--overwrite").exit_code == 2


def test_compare_in_every_form(runs: Path) -> None:
    table = call("compare", str(runs))
    assert table.exit_code == 0
    assert "against zero-shot" in table.stdout
    lines = json.loads(call("compare", str(runs), "--json").stdout)
    assert [line["method"] for line in lines] == ["zero-shot", "knn"]
    assert lines[1]["change"]["p"] <= 1
    rows = list(csv.DictReader(io.StringIO(call("compare", str(runs), "--csv").stdout)))
    assert float(rows[1]["score_mean"]) == pytest.approx(lines[1]["score"]["mean"])
    latex = call("compare", str(runs), "--latex").stdout
    assert latex.startswith(r"\begin{tabular}{lc}")
    assert "zero-shot & " in latex


def test_a_page(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert call("report", str(runs), "-o", str(page)).exit_code == 0
    text = page.read_text(encoding="utf8")
    assert "<svg" in text
    assert "src=" not in text


def test_the_list_of_tasks() -> None:
    result = call("eval", "--list")
    assert "arc_easy" in result.stdout
    listed = json.loads(call("eval", "--list", "--json").stdout)
    assert {"zero-shot", "knn", "sft"} <= {method["name"] for method in listed["methods"]}
    names = [task["name"] for task in listed["tasks"]]
    assert names[:2] == ["gpqa", "mmlu"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tiny-olmoe"], "Give a MODEL, at least one -t TASK and -o RUNS"),
        (["tiny-olmoe", "-t", "arc_eesy", "-o", "OUT"], "Did you mean 'arc_easy'?"),
        (["tiny-olmoe", "-t", "QUIZ", "-o", "OUT", "--scoring", "text"], "not by text"),
        (["tiny-olmoe", "-t", "QUIZ", "-o", "OUT", "--limit", "0"], "limit must be at least 1"),
        (["tiny-olmo", "-t", "QUIZ", "-o", "OUT"], "Did you mean 'tiny-olmoe'?"),
        (["tiny-olmoe", "-t", "QUIZ", "-o", "OUT", "-m", "magic"], "Unknown method 'magic'"),
        (["./nosuch", "-t", "QUIZ", "-o", "OUT"], "from './nosuch': There is no such folder"),
        (["tiny-olmoe", "-t", "arc_easy", "-o", "OUT", "--data", "OUT"], "No file arc_easy_test"),
        (["tiny-olmoe", "-t", "QUIZ", "-o", "OUT", "--memory", "OUT"], "OUT"),
        (["tiny-olmoe", "-t", "QUIZ", "-o", "OUT", "--index", "fats"], "Unknown index 'fats'"),
        (
            ["tiny-olmoe", "-t", "QUIZ", "-t", "QUIZ", "-o", "OUT"],
            "Two tasks have the same name: quiz",
        ),
        (["tiny-olmoe", "-t", "ALONE", "-o", "OUT"], "alone has no reference set here"),
    ],
)
def test_wrong_calls_leave_nothing_behind(
    arguments: list[str], told: str, quiz: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone.jsonl"
    alone.write_text(json.dumps(make_questions(1)[0]) + "\n", encoding="utf8")
    places = {"QUIZ": str(quiz), "OUT": str(tmp_path / "out"), "ALONE": str(alone)}
    result = call("eval", *(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert places.get(told, told) in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_memory_of_another_model_is_told_before_anything_runs(
    quiz: Path, runs: Path, tmp_path: Path
) -> None:
    (memory,) = (runs / "quiz").glob("memory-*")
    result = call("eval", "tiny-qwen3", "-t", str(quiz), "--memory", str(memory), "-o",
                  str(tmp_path / "out"), "--device", "cpu")  # fmt: skip
    assert result.exit_code == 2
    assert "built for 'tiny-olmoe'" in result.output
    assert not (tmp_path / "out").exists()


def test_runs_that_are_not_there(tmp_path: Path) -> None:
    result = call("compare", str(tmp_path))
    assert result.exit_code == 2
    assert "There are no runs in" in result.output
    both = call("compare", str(tmp_path), "--json", "--csv")
    assert "Choose one of --json, --latex and --csv" in both.output
