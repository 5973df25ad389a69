"""The paper's tables: every one is made, continues after a stop, and says how it was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import assert_refused, run_cli
from helpers.small_models import load_small
from knn_moe.errors import ConfigError, KnnMoeError, RunError
from knn_moe.evaluation.store import read_run
from knn_moe.reproduce.catalogue import TABLES, choose_tables
from knn_moe.reproduce.plan import PAPER_TASKS, Plan
from knn_moe.reproduce.reproduce import reproduce
from knn_moe.reproduce.study import Study
from knn_moe.reproduce.table import Table
from knn_moe.reproduce.write import read_table


def make_study(quiz: str, folder: Path, **changes: Any) -> Study:
    plan = {
        "models": ("tiny-olmoe",),
        "tasks": (quiz,),
        "sizes": (0.5, 1.0),
        "limit": 4,
        "reference": 5,
    }
    return Study(Plan(**{**plan, **changes}), folder, load_small)


@pytest.fixture(scope="module")
def all_tables(quiz: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Table]]:
    """The folder of a study of a few questions, and all of its tables."""
    folder = tmp_path_factory.mktemp("all")
    return folder, list(reproduce(make_study(quiz, folder), ["all"]))


@pytest.mark.slow
def test_all_fourteen_tables_are_made_and_written(all_tables: tuple[Path, list[Table]]) -> None:
    folder, tables = all_tables
    assert [table.name for table in tables] == list(TABLES)
    assert len(tables) == 14
    page = (folder / "tables.md").read_text(encoding="utf8")
    assert all(f"## {table.title}" in page for table in tables)
    for table in tables:
        for kind in ("json", "md", "tex", "svg"):
            assert (folder / f"{table.name}.{kind}").stat().st_size > 100
        assert read_table(folder, table.name) == table
        assert any(cell.value is not None for cells in table.rows for cell in cells)
        assert table.facts["models"] == ["tiny-olmoe"]
        assert {"hardware", "versions", "seed", "tasks"} <= set(table.facts)
        assert "not measured here" in (folder / f"{table.name}.md").read_text(encoding="utf8")


@pytest.mark.slow
def test_every_cell_for_a_task_of_questions_has_a_value(
    all_tables: tuple[Path, list[Table]],
) -> None:
    _, tables = all_tables
    for table in tables:
        assert [cell for cells in table.rows for cell in cells if cell.text == "-"] == []


@pytest.mark.slow
def test_tables_show_the_numbers_of_their_runs(all_tables: tuple[Path, list[Table]]) -> None:
    folder, tables = all_tables
    main_table = {cells[1].text: cells for cells in tables[0].rows}
    for method, title in (("zero-shot", "Zero-shot"), ("knn", "kNN-MoE"), ("sft", "SFT")):
        run = read_run(folder / "runs" / "tiny-olmoe" / "quiz" / method)
        score = 100 * sum(sample.score for sample in run.samples) / len(run.samples)
        assert main_table[title][2].value == pytest.approx(score)
        assert len(run.samples) == 4
    time = next(table for table in tables if table.name == "construction-time")
    seconds = dict(zip(time.columns, time.rows[0], strict=True))
    facts = read_run(folder / "runs" / "tiny-olmoe" / "quiz" / "sft").facts
    assert seconds["SFT, search"].value == facts["preparation_seconds"]
    rates = len(facts["method_facts"]["validation_losses"])
    assert rates >= 3
    assert seconds["SFT, one training"].value == facts["preparation_seconds"] / rates


@pytest.mark.slow
def test_a_smaller_reference_set_takes_less_memory(all_tables: tuple[Path, list[Table]]) -> None:
    _, tables = all_tables
    held = next(table for table in tables if table.name == "memory-use")
    exact = [cells[3].value for cells in held.rows]
    assert exact == sorted(exact)  # type: ignore[type-var]
    assert len(set(exact)) == 3


@pytest.mark.slow
def test_finished_tables_and_runs_are_not_made_again(
    all_tables: tuple[Path, list[Table]], quiz: str
) -> None:
    folder, tables = all_tables
    kept = folder / "runs" / "tiny-olmoe" / "quiz"
    before = (kept / "knn" / "run.json").stat().st_mtime_ns
    (folder / "perplexity.json").unlink()
    (kept / "knn-paper-k-3" / "run.json").unlink()
    (folder / "neighbours.json").unlink()
    again = list(reproduce(make_study(quiz, folder), ["perplexity", "neighbours", "main"]))
    assert again == [tables[1], tables[4], tables[0]]
    assert (kept / "knn" / "run.json").stat().st_mtime_ns == before
    assert (kept / "knn-paper-k-3" / "run.json").exists()


@pytest.mark.slow
def test_seeds_are_that_of_the_plan_and_the_next_two(quiz: str, tmp_path: Path) -> None:
    (table,) = reproduce(make_study(quiz, tmp_path, seed=1, limit=3, reference=4), ["seeds"])
    assert "seeds 1, 2, 3" in table.notes[0]
    runs = tmp_path / "runs" / "tiny-olmoe" / "quiz"
    found = {path.name for path in runs.iterdir() if path.name.startswith("sft-router")}
    assert found == {"sft-router", "sft-router-seed-2", "sft-router-seed-3"}
    facts = read_run(runs / "sft-router-seed-3").facts["method_facts"]
    assert facts["seed"] == 3
    assert len(facts["validation_losses"]) == 1


@pytest.mark.slow
def test_two_processes_make_the_same_tables_as_one(quiz: str, prose: str, tmp_path: Path) -> None:
    """On two models, with questions and with text."""
    changes = {"models": ("tiny-olmoe", "tiny-qwen3"), "tasks": (quiz, prose), "reference": 2}
    changes |= {"sizes": (1.0,), "preset": "paper"}
    study = make_study(quiz, tmp_path / "one", **changes)
    names = ["perplexity", "reference-size"]
    plain = list(reproduce(study, names))
    beside = list(reproduce(replace(study, folder=tmp_path / "two", jobs=2), names))
    for one, two in zip(plain, beside, strict=True):
        assert two.facts["jobs"] == 2
        assert [[cell.text for cell in cells] for cells in one.rows] == [
            [cell.text for cell in cells] for cells in two.rows
        ]
    gains, sizes = plain
    assert [cells[0].text for cells in gains.rows] == ["tiny-olmoe"] * 2 + ["tiny-qwen3"] * 2
    assert [cells[0].text for cells in sizes.rows] == ["quiz.jsonl"] * 3 + ["prose.jsonl"] * 2
    assert len(sizes.columns) == 2 + 2
    of_text = next(cells for cells in sizes.rows[2:] if cells[1].text == "0%")
    assert [cell.text for cell in of_text[2:]] == ["+0.000"] * 2


def test_c3po_has_no_table_of_text_alone(prose: str, tmp_path: Path) -> None:
    study = make_study(prose, tmp_path / "study", limit=2)
    with pytest.raises(ConfigError, match="'c3po' needs a task with questions, and every task"):
        list(reproduce(study, ["c3po"]))
    assert not study.folder.exists()


def test_a_study_that_is_refused_leaves_no_folder(quiz: str, tmp_path: Path) -> None:
    lonely = tmp_path / "lonely.jsonl"
    lonely.write_text(Path(quiz).read_text(encoding="utf8"), encoding="utf8")
    for changes, message in (
        ({"tasks": ("mmul",)}, "mmlu"),
        ({"tasks": (str(lonely),)}, "no reference set"),
        ({"models": ("a/b", "a--b")}, "Two models have the name 'a--b'"),
        ({"tasks": (quiz, quiz)}, "Two tasks have the name 'quiz'"),
    ):
        with pytest.raises(KnnMoeError, match=message):
            list(reproduce(make_study(quiz, tmp_path / "out", **changes), ["perplexity"]))
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_table_that_fails_does_not_stop_the_others(
    quiz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(study: Study) -> Table:
        raise ConfigError("This one cannot be made.")

    monkeypatch.setattr("knn_moe.reproduce.results.selective", fails)
    tables = reproduce(
        make_study(quiz, tmp_path, limit=3, reference=3), ["selective", "perplexity"]
    )
    assert next(tables).name == "perplexity"
    with pytest.raises(ConfigError, match="cannot be made"):
        next(tables)
    assert (tmp_path / "perplexity.md").exists()
    assert not (tmp_path / "selective.json").exists()


@pytest.mark.slow
def test_another_plan_needs_another_folder(all_tables: tuple[Path, list[Table]], quiz: str) -> None:
    folder, _ = all_tables
    with pytest.raises(RunError, match="has limit 4, not 5"):
        list(reproduce(make_study(quiz, folder, limit=5), ["main"]))
    other = replace(make_study(quiz, folder), dtype="bfloat16")
    with pytest.raises(RunError, match="has dtype 'float32', not 'bfloat16'"):
        list(reproduce(other, ["main"]))


def test_names_and_plans_are_checked() -> None:
    assert choose_tables(["all", "main"]) == list(TABLES)
    with pytest.raises(ConfigError, match="Did you mean 'neighbours'"):
        choose_tables(["neighbors"])
    with pytest.raises(ConfigError, match="at least one of its models"):
        Plan(models=())
    with pytest.raises(ConfigError, match="shares"):
        Plan(sizes=(2.0,))
    paper = Plan.of_the_paper(("m",), None, limit=7)
    assert (paper.tasks, paper.generate, paper.limit) == (PAPER_TASKS, True, 7)
    assert (paper.preset, paper.presets, paper.steps_share) == ("paper", ("paper",), 1.0)
    assert (paper.swept, paper.seeded) == (("medmcqa",), ("gpqa", "mmlu", "usmle"))
    study = Study(paper, Path(), load_small)
    assert study.choose_methods(["zero-shot", "knn-paper", "knn"]) == ["zero-shot", "knn"]
    assert Plan(tasks=("arc_easy",)).swept == ("arc_easy",)
    part = Plan(models=("a", "b")).restrict("b", "mmlu")
    assert (part.models, part.tasks, part.swept, part.seeded) == (("b",), ("mmlu",), (), ())


def test_the_command_lists_tables_and_refuses_bad_calls() -> None:
    listed = run_cli("reproduce", "--list", "--json")
    assert [each["name"] for each in json.loads(listed.stdout)] == list(TABLES)
    for wrong, message in (
        (["nothing", "-o", "x"], "Unknown table 'nothing'"),
        (["main"], "-o FOLDER"),
        (["main", "--as-printed", "-o", "x"], "--model"),
    ):
        assert_refused(run_cli("reproduce", *wrong), message)
        assert not Path("x").exists()


@pytest.mark.slow
def test_the_command_makes_a_table(quiz: str, tmp_path: Path) -> None:
    for part in load_small("tiny-olmoe"):
        part.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    result = run_cli(
        "reproduce", "perplexity", "-o", out, "--model", tmp_path / "model", "-t", quiz,
        "--limit", 5, "--reference", 3, "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Gains by perplexity" in result.stdout
    assert (out / "perplexity.tex").exists()
