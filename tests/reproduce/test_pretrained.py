"""The study of pretrained models: runs in slices, and tables of whatever is there."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import assert_refused, run_cli
from helpers.small_models import load_small
from knn_moe.cli.pretrained import _PARTS
from knn_moe.errors import ConfigError, ModelTooLargeError
from knn_moe.evaluation.store import read_run
from knn_moe.reproduce.pretrained import study as study_module
from knn_moe.reproduce.pretrained.compare import Change, Comparer, Result
from knn_moe.reproduce.pretrained.make import TABLES, count_tokens, make_tables
from knn_moe.reproduce.pretrained.plan import ALL, PARTS, PretrainedPlan, RunSpec
from knn_moe.reproduce.pretrained.processes import make_runs_in_processes
from knn_moe.reproduce.pretrained.study import PretrainedStudy
from knn_moe.reproduce.pretrained.tables import score_cell
from knn_moe.reproduce.table import Table
from knn_moe.support.statistics import Accuracy, Comparison, DoubtedComparison

MODEL = "tiny-olmoe"
METHODS = ("zero-shot", "knn-lm", "knn-paper", "sft-router")


def make_study(folder: Path, *tasks: str, **changes: Any) -> PretrainedStudy:
    plan = {
        "models": (MODEL,),
        "tasks": tasks,
        "methods": METHODS,
        "reference": 6,
        "texts": 6,
        "limit": 6,
    }
    plan |= {"sizes": (3, 6, 50), "batch_tokens": 300, "one_rate": True}
    return PretrainedStudy(PretrainedPlan(**plan | changes), folder, load_small)


@pytest.fixture(scope="module")
def finished(quiz: str, prose: str, tmp_path_factory: pytest.TempPathFactory) -> PretrainedStudy:
    """A study of every part but generation, with all of its runs."""
    study = make_study(tmp_path_factory.mktemp("study"), quiz, prose)
    assert len(list(study.make_runs())) == 18
    assert study.failures == []
    return study


def test_the_runs_of_each_part(quiz: str, prose: str, tmp_path: Path) -> None:
    study = make_study(tmp_path, quiz, prose)

    def names(part: str) -> set[tuple[str, str]]:
        return {(Path(spec.task).stem, spec.name) for spec in study.specs(part, MODEL)}

    own = {"zero-shot", "knn-lm-6", "knn-paper-6", "sft-router-6"}
    assert names("accuracy") == {("quiz", name) for name in own}
    assert names("text") == {("prose", name) for name in own}
    assert ("quiz", "knn-lm-3") in names("growth")
    assert not any(name.endswith("-50") for _, name in names("growth"))  # there are not so many
    assert {("prose", "knn-lm-of-quiz-6"), ("quiz", "knn-lm-6")} <= names("transfer")
    assert {("quiz", "sft-router-of-all-6"), ("quiz", "sft-router-6")} <= names("together")
    assert names("generation") == set()
    assert all(study.specs(part, MODEL)[0].method == "zero-shot" for part in PARTS[:-1])
    assert tuple(TABLES) == PARTS == _PARTS


def test_plans_are_checked() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'accuracy'"):
        PretrainedPlan(models=("m",), parts=("acuracy",))
    with pytest.raises(ConfigError, match="Did you mean 'knn-calibrated'"):
        PretrainedPlan(models=("m",), methods=("knn-callibrated",))
    with pytest.raises(ConfigError, match="at least one of its models"):
        PretrainedPlan(models=())
    with pytest.raises(ConfigError, match="must be at least 1"):
        PretrainedPlan(models=("m",), sizes=(0,))
    assert RunSpec("m", "a", "knn", ALL, 5).name == "knn-of-all-5"


def test_what_has_nothing_to_run_is_refused(quiz: str, prose: str, tmp_path: Path) -> None:
    for tasks, chosen, message in (
        ((prose,), ("--part", "accuracy"), "The part 'accuracy' has nothing to run on"),
        ((quiz,), ("--part", "text"), "The part 'text' has nothing to run on"),
        ((prose,), ("--part", "text", "-m", "c3po"), "c3po has nothing to run on"),
    ):
        named = [part for task in tasks for part in ("-t", task)]
        study = ("--model", MODEL, "-o", tmp_path / "out", "--limit", 2)
        result = run_cli("reproduce", "pretrained", *study, *named, *chosen)
        assert_refused(result, message)
        assert not (tmp_path / "out").exists()
    make_study(tmp_path, quiz, prose).check(("accuracy", "text"), METHODS)


def test_a_change_in_doubt_is_neither_better_nor_worse() -> None:
    spec, found = RunSpec("m", "quiz", "knn-paper", "quiz", 6), Comparison(0.2, 0.1, 0.3, 0.001)
    for doubt, better, shown in ((None, True, "†"), ("both scores are at chance", False, "°")):
        change = Change(DoubtedComparison.of(found, doubt), adjusted_p=0.001)
        score = Accuracy(0.3, 0.2, 0.4, 60)
        result = Result(spec, "Quiz", False, score, 1.0, 0.25, 0.1, {"zero-shot": change})
        assert result.is_better() == better
        assert not result.is_worse()
        assert score_cell(result).text == f"30.0 ± 10.0{shown} (10% unparsed)"


@pytest.mark.slow
def test_a_finished_study_makes_no_run_again(finished: PretrainedStudy) -> None:
    assert finished.missing() == []
    again = replace(finished, _loaded={}, load=lambda name: pytest.fail(f"loads {name}"))
    assert list(again.make_runs()) == []


@pytest.mark.slow
def test_tables_show_the_numbers_of_their_runs(finished: PretrainedStudy) -> None:
    tables = {table.name: table for table in make_tables(finished)}
    assert list(tables) == [
        "pretrained-summary", "pretrained-accuracy", "pretrained-accuracy-details",
        "pretrained-text", "pretrained-text-details", "pretrained-growth", "pretrained-transfer",
        "pretrained-together",
    ]  # fmt: skip
    for table in tables.values():
        assert (finished.folder / f"{table.name}.md").exists()
        assert not any("Missing" in note for note in table.notes)
        assert table.facts["dtype"] == "float32"
    accuracy = _rows(tables["pretrained-accuracy"])
    run = read_run(finished.folder / "runs" / MODEL / "quiz" / "knn-lm-6")
    score = 100 * sum(sample.score for sample in run.samples) / len(run.samples)
    assert accuracy["kNN-LM"][2].value == pytest.approx(score)
    choices = [len(sample.likelihoods or ()) for sample in run.samples]
    chance = 100 * sum(1 / count for count in choices) / len(choices)
    assert accuracy["Chance"][2].value == pytest.approx(chance)
    assert accuracy["kNN-LM"][-1].value == pytest.approx(run.facts["preparation_seconds"], abs=0.1)
    text = _rows(tables["pretrained-text"])
    losses = [
        read_run(finished.folder / "runs" / MODEL / "prose" / name).samples
        for name in ("knn-lm-6", "zero-shot")
    ]
    ours, base = (sum(sample.nll or 0 for sample in each) / len(each) for each in losses)
    assert text["Zero-shot"][2].value == pytest.approx(base)
    assert text["kNN-LM"][2].value == pytest.approx(ours - base)


def _rows(table: Table) -> dict[str, Any]:
    return {row[1].text: row for row in table.rows}


@pytest.mark.slow
def test_p_values_are_adjusted_within_their_family(finished: PretrainedStudy) -> None:
    specs = [spec for part in ("accuracy", "text") for spec in finished.specs(part, MODEL)]
    comparer = Comparer(finished)
    alone = comparer.compare(specs, lambda spec: spec)
    together = comparer.compare(specs, lambda spec: spec.method)
    assert set(alone) == set(specs)
    for spec, result in alone.items():
        if spec.method != "zero-shot":
            change = result.changes["zero-shot"]
            assert change.adjusted_p == change.comparison.p
            assert together[spec].changes["zero-shot"].adjusted_p >= change.adjusted_p
        assert ("knn-lm" in result.changes) == (spec.method != "knn-lm")


@pytest.mark.slow
def test_a_rate_is_searched_on_the_first_task_only(finished: PretrainedStudy) -> None:
    runs = finished.folder / "runs" / MODEL
    tried = [
        len(read_run(path.parent).facts["method_facts"]["validation_losses"])
        for path in runs.glob("*/sft-router-*/run.json")
    ]
    assert sorted(tried)[-1] >= 3
    # The first one's method was also asked about the other task.
    assert len([count for count in tried if count == 1]) >= len(tried) - 2


@pytest.mark.slow
def test_partial_tables_say_what_is_missing(finished: PretrainedStudy, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "runs" / MODEL / "quiz" / "knn-paper-6")
    study = replace(
        finished, folder=tmp_path / "part", plan=replace(finished.plan, parts=_PARTS[:1])
    )
    table = next(table for table in make_tables(study) if table.name == "pretrained-accuracy")
    assert _rows(table)["kNN-MoE (the paper's setting)"][2].text == "-"
    assert "Missing: 1 of 4 runs" in table.notes[-1]
    assert "knn-paper-6" in table.notes[-1]
    ((spec, _),) = study.make_runs()
    assert spec.name == "knn-paper-6"


@pytest.mark.slow
def test_time_and_failures_leave_runs_for_later(
    quiz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(tmp_path, quiz, parts=("accuracy",), methods=("zero-shot", "knn-paper"))
    assert list(study.make_runs(deadline=time.monotonic())) == []
    assert make_tables(study) == []

    def fail(name: str, context: Any) -> Any:
        if name == "knn-paper":
            raise ConfigError("There is no room.")
        return real(name, context)

    real = study_module.prepare
    monkeypatch.setattr(study_module, "prepare", fail)
    assert [spec.name for spec, _ in study.make_runs()] == ["zero-shot"]
    assert study.failures == [f"{MODEL}, knn-paper-6: There is no room."]
    assert [spec.name for spec in study.missing()] == ["knn-paper-6"]


@pytest.mark.slow
def test_several_processes_make_the_same_runs(quiz: str, prose: str, tmp_path: Path) -> None:
    given = ["-t", quiz, "-t", prose, "--part", "accuracy", "--part", "text", "--device", "cpu"]
    given += [
        "-m",
        "zero-shot",
        "-m",
        "knn-lm",
        "--reference",
        6,
        "--texts",
        6,
        "--limit",
        6,
        "--no-tables",
    ]
    command = ["reproduce", "pretrained", "--model", MODEL, *given]
    for jobs in (1, 2):
        made = run_cli(*command, "-o", tmp_path / f"{jobs}", "--jobs", jobs)
        assert made.exit_code == 0, made.output
    paths = [path.relative_to(tmp_path / "1") for path in tmp_path.glob("1/runs/*/*/*")]
    assert len(paths) == 4
    for path in paths:
        one, other = (read_run(tmp_path / f"{jobs}" / path) for jobs in (1, 2))
        assert [sample.score for sample in one.samples] == [
            sample.score for sample in other.samples
        ]
    again = run_cli(*command, "-o", tmp_path / "2", "--jobs", 2)
    assert "knn-lm" not in again.stderr


class OneAtATime:
    """Loads a small model where no other living process has loaded one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str) -> Any:
        path = self.folder / "holder"
        holder = int(path.read_text(encoding="utf8")) if path.exists() else os.getpid()
        if holder != os.getpid() and Path(f"/proc/{holder}").exists():
            raise ModelTooLargeError("There is no room.")
        path.write_text(str(os.getpid()), encoding="utf8")
        return load_small(name)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc to see processes")
def test_what_does_not_fit_is_made_by_fewer_processes(quiz: str, tmp_path: Path) -> None:
    study = make_study(tmp_path, quiz, parts=("accuracy",), methods=("zero-shot", "knn-lm"))
    (tmp_path / "holder").write_text(str(os.getpid()), encoding="utf8")  # of no room at first
    crowded = replace(study, load=OneAtATime(tmp_path))
    assert list(make_runs_in_processes(crowded, 1)) == []
    assert len(crowded.failures) == 2
    assert "There is no room." in crowded.failures[0]
    (tmp_path / "holder").unlink()
    crowded.failures.clear()
    made = [spec.method for spec, _ in make_runs_in_processes(crowded, 2)]
    assert sorted(made) == ["knn-lm", "zero-shot"]
    assert crowded.failures == []


def test_tokens_are_counted(quiz: str, prose: str, tmp_path: Path) -> None:
    study = make_study(tmp_path, quiz, prose)
    counted = list(count_tokens(study, load_small(MODEL)[1]))
    assert [Path(name).stem for name, *_ in counted] == ["quiz", "prose"]
    (_, questions, tokens, batches), _ = counted
    assert questions == 6
    assert tokens > questions
    assert 1 <= batches <= questions


def test_the_command_refuses_bad_calls(quiz: str, tmp_path: Path) -> None:
    given = ["--model", MODEL, "-o", str(tmp_path / "out"), "-t", quiz]
    for wrong, message in (
        (["-m", "knn-callibrated"], "Did you mean 'knn-calibrated'"),
        (["--part", "acuracy"], "accuracy"),
    ):
        assert_refused(run_cli("reproduce", "pretrained", *given, *wrong), message)
    assert_refused(run_cli("reproduce", "pretrained", "-o", "x"), "--model")
    twice = ["--model", f"other/{MODEL}"]
    assert_refused(run_cli("reproduce", "pretrained", *given, *twice), "the same name")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_makes_runs_then_tables(quiz: str, tmp_path: Path) -> None:
    for part in load_small(MODEL):
        part.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    given = ["--model", str(tmp_path / "model"), "-o", str(out), "-t", quiz, "--part", "accuracy"]
    given += ["-m", "zero-shot", "-m", "knn-paper", "--limit", "4", "--reference", "3"]
    command = ["reproduce", "pretrained", *given, "--device", "cpu"]
    made = run_cli(*command, "--no-tables", "--minutes", "5")
    assert made.exit_code == 0, made.output
    assert "knn-paper-3" in made.stderr
    assert not (out / "tables.md").exists()
    shutil.rmtree(tmp_path / "model")
    assert (out / "runs" / "model" / "quiz" / "zero-shot").is_dir()
    shown = run_cli(*command, "--no-runs", "--json")
    assert shown.exit_code == 0, shown.output
    assert [table["name"] for table in json.loads(shown.stdout)][1] == "pretrained-accuracy"
    assert (out / "tables.md").exists()
