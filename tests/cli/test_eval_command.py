"""`knn-moe eval`, `compare` and `report`, as a user calls them."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from helpers.commands import assert_refused, run_cli
from helpers.html_page import assert_self_contained
from helpers.quiz import make_questions


@pytest.fixture(scope="module")
def quiz_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of one's own: questions, and a reference set beside them."""
    folder = tmp_path_factory.mktemp("quiz")
    for name, rows in (("quiz", make_questions(8)), ("quiz_ref", make_questions(3, seed=1))):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf8")
    return folder / "quiz.jsonl"


def evaluation(quiz_file: Path, output: Path, *more: object) -> tuple[object, ...]:
    """Return a short evaluation's arguments."""
    task = ("-t", quiz_file, "--scoring", "likelihood", "--preset", "paper")
    return ("eval", "tiny-olmoe", *task, "-o", output, "--batch-size", 4, "--device", "cpu", *more)


@pytest.fixture(scope="module")
def runs(quiz_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of zero-shot and knn. Tests must not write into the folder."""
    folder = tmp_path_factory.mktemp("runs")
    result = run_cli(*evaluation(quiz_file, folder))
    assert result.exit_code == 0, result.output
    assert "zero-shot" in result.stdout
    assert "knn" in result.stdout
    return folder


@pytest.mark.slow
def test_every_answer_is_saved(runs: Path) -> None:
    for method in ("zero-shot", "knn"):
        lines = (runs / "quiz" / method / "samples.jsonl").read_text(encoding="utf8").splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == 8
        assert {"id", "prompt", "score", "nll", "parsed", "likelihoods"} <= set(samples[0])
        facts = json.loads((runs / "quiz" / method / "run.json").read_text(encoding="utf8"))
        assert facts["finished"]
        assert facts["model"]["name"] == "tiny-olmoe"
        assert facts["dtype"] == "float32"


@pytest.mark.slow
def test_resuming_uses_finished_runs(runs: Path, quiz_file: Path) -> None:
    again = run_cli(*evaluation(quiz_file, runs, "--resume", "--json"))
    assert again.exit_code == 0, again.output
    found = json.loads(again.stdout)
    assert [run["method"] for run in found] == ["zero-shot", "knn"]
    assert {0 < run["chance"] <= 0.5 for run in found} == {True}
    assert {(run["unparsed"], run["unparsed_share"]) for run in found} == {(None, None)}
    assert_refused(run_cli(*evaluation(quiz_file, runs)), str(runs))


def test_a_model_without_a_chat_template_is_scored_by_likelihood(
    quiz_file: Path, tmp_path: Path
) -> None:
    short = ("-m", "zero-shot", "--limit", 2, "--device", "cpu", "--max-new-tokens", 2)
    usual = run_cli("eval", "tiny-olmoe", "-t", quiz_file, *short, "-o", tmp_path / "usual")
    said = " ".join(usual.stderr.split())
    assert "quiz is scored by likelihood, because the model has no chat template." in said
    assert "--scoring generation" in said
    assert "NLL of right answer" in " ".join(usual.stdout.split())
    told = ("--scoring", "generation", "--json", "-o", tmp_path / "told")
    result = run_cli("eval", "tiny-olmoe", "-t", quiz_file, *short, *told)
    assert "chat template" not in result.stderr
    (run,) = json.loads(result.stdout)
    assert run["scoring"] == "generation"
    assert run["unparsed_share"] == 1.0
    assert run["chance"] > 0


@pytest.mark.slow
def test_another_method_uses_the_memory_that_is_there(
    runs: Path, quiz_file: Path, tmp_path: Path
) -> None:
    runs = shutil.copytree(runs, tmp_path / "runs")
    selective = evaluation(quiz_file, runs, "-m", "knn-selective")
    before = sorted(path.stat().st_mtime_ns for path in (runs / "quiz").glob("memory-*"))
    assert run_cli(*selective).exit_code == 0
    assert sorted(path.stat().st_mtime_ns for path in (runs / "quiz").glob("memory-*")) == before
    # A finished run is neither prepared nor evaluated again.
    run = runs / "quiz" / "knn-selective" / "run.json"
    written = run.stat().st_mtime_ns
    again = run_cli(*selective, "--resume", "--json")
    assert again.exit_code == 0, again.output
    assert run.stat().st_mtime_ns == written
    assert_refused(run_cli(*selective, "--resume", "--reference", 2), "--overwrite")
    assert_refused(run_cli(*selective, "--preset", "strong"), "use `--calibrate`")


@pytest.mark.slow
def test_overwriting_replaces_runs_and_memories(quiz_file: Path, tmp_path: Path) -> None:
    short = ("--limit", 3, "--reference", 2, "-m", "knn")
    for more in ((), ("--overwrite",)):
        result = run_cli(*evaluation(quiz_file, tmp_path, *short, *more))
        assert result.exit_code == 0, result.output
        assert "against knn" in result.stdout
    assert_refused(
        run_cli(*evaluation(quiz_file, tmp_path, "--resume", "--overwrite")), "cannot be combined"
    )


@pytest.mark.slow
def test_compare_in_every_form(runs: Path) -> None:
    assert "against zero-shot" in run_cli("compare", runs).stdout
    lines = json.loads(run_cli("compare", runs, "--json").stdout)
    assert [line["method"] for line in lines] == ["zero-shot", "knn"]
    assert lines[1]["change"]["p"] <= 1
    rows = list(csv.DictReader(io.StringIO(run_cli("compare", runs, "--csv").stdout)))
    assert float(rows[1]["score_mean"]) == pytest.approx(lines[1]["score"]["mean"])
    latex = run_cli("compare", runs, "--latex").stdout
    assert latex.startswith(r"\begin{tabular}{lc}")
    assert "zero-shot & " in latex


@pytest.mark.slow
def test_report_writes_a_page_without_links(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run_cli("report", runs, "-o", page).exit_code == 0
    text = page.read_text(encoding="utf8")
    assert "<title>kNN-MoE: tiny-olmoe on quiz</title>" in text
    assert_self_contained(text)


@pytest.mark.slow
def test_a_memory_of_another_model_is_refused(quiz_file: Path, runs: Path, tmp_path: Path) -> None:
    (memory,) = (runs / "quiz").glob("memory-*")
    task = ("-t", quiz_file, "--memory", memory, "-o", tmp_path / "out", "--device", "cpu")
    assert_refused(run_cli("eval", "tiny-qwen3", *task), "built for 'tiny-olmoe'")
    assert not (tmp_path / "out").exists()


def test_the_list_of_tasks_and_methods() -> None:
    assert "arc_easy" in run_cli("eval", "--list").stdout
    listed = json.loads(run_cli("eval", "--list", "--json").stdout)
    assert {"zero-shot", "knn", "sft"} <= {method["name"] for method in listed["methods"]}
    assert [task["name"] for task in listed["tasks"]][:2] == ["gpqa", "mmlu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tiny-olmoe", "Give a MODEL, at least one -t TASK and -o RUNS"),
        ("tiny-olmoe -t arc_eesy -o OUT", "Did you mean 'arc_easy'?"),
        ("tiny-olmoe -t QUIZ -o OUT --scoring text", "not by text"),
        ("tiny-olmoe -t QUIZ -o OUT --limit 0", "limit must be at least 1"),
        ("tiny-olmo -t QUIZ -o OUT", "Did you mean 'tiny-olmoe'?"),
        ("tiny-olmoe -t QUIZ -o OUT -m magic", "Unknown method 'magic'"),
        ("./nosuch -t QUIZ -o OUT", "from './nosuch': There is no such folder"),
        ("tiny-olmoe -t arc_easy -o OUT --data OUT", "arc_easy_test"),
        ("tiny-olmoe -t QUIZ -o OUT --memory OUT", "OUT"),
        ("tiny-olmoe -t QUIZ -o OUT --memory OUT --reference 3", "--reference has no effect"),
        ("tiny-olmoe -t QUIZ -o OUT --memory OUT --preset paper", "--preset has no effect"),
        ("./nosuch -t QUIZ -o OUT -m knn-calibrated", "knn-calibrated needs at least 24 reference"),
        ("./nosuch -t QUIZ -o OUT -m sft --reference 1", "sft needs at least 2 reference rows"),
        ("tiny-olmoe -t QUIZ -o OUT -m zero-shot --memory M", "--memory has no effect on zero-sho"),
        ("tiny-olmoe -t QUIZ -o OUT --index fats", "Unknown index 'fats'"),
        ("tiny-olmoe -t QUIZ -t QUIZ -o OUT", "Two tasks have the same name: quiz"),
        ("tiny-olmoe -t BARE -o OUT", "bare has no reference set"),
    ],
)
def test_bad_input_leaves_nothing_behind(
    arguments: str, message: str, quiz_file: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.jsonl"
    bare.write_text(json.dumps(make_questions(1)[0]) + "\n", encoding="utf8")
    places = {"QUIZ": str(quiz_file), "OUT": str(tmp_path / "out"), "BARE": str(bare)}
    result = run_cli("eval", *(places.get(word, word) for word in arguments.split()))
    assert_refused(result, places.get(message, message))
    assert not (tmp_path / "out").exists()


def test_comparing_what_is_not_there(tmp_path: Path) -> None:
    assert_refused(run_cli("compare", tmp_path), str(tmp_path))
    both = run_cli("compare", tmp_path, "--json", "--csv")
    assert_refused(both, "Choose one of --json, --latex and --csv")


@pytest.fixture
def program_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task whose answers are programs."""
    monkeypatch.delenv("KNN_MOE_RUN_CODE", raising=False)
    row = {"prompt": "Add.", "code": "def add(a, b): return a + b", "tests": ["assert add(1, 2)"]}
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf8")
    return path


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "no/model", "-m", "zero-shot"),
        ("reproduce", "main", "--model", "tiny-olmoe"),
        ("reproduce", "pretrained", "--model", "tiny-olmoe", "--part", "generation"),
    ],
    ids=["eval", "reproduce", "pretrained"],
)
def test_programs_need_consent(
    command: tuple[str, ...], program_file: Path, tmp_path: Path
) -> None:
    reference = {"prompt": "Sub.", "code": "def sub(a, b): return a - b", "tests": ["x"]}
    (tmp_path / "sums_ref.jsonl").write_text(json.dumps(reference) + "\n", encoding="utf8")
    output = tmp_path / "runs"
    refused = run_cli(*command, "-t", program_file, "-o", output)
    assert_refused(refused, "'sums' runs programs that the model writes", "--run-code")
    assert not output.exists()


@pytest.mark.slow
def test_programs_run_with_consent(program_file: Path, tmp_path: Path) -> None:
    task = ("-t", program_file, "-m", "zero-shot", "--max-new-tokens", 4, "--device", "cpu")
    output = tmp_path / "runs"
    result = run_cli("eval", "tiny-olmoe", *task, "-o", output, "--run-code", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[0]["score"] == 0
    assert "KNN_MOE_RUN_CODE" not in os.environ
