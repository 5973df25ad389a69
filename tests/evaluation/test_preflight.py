"""What cannot work is refused before anything runs; whatever is not refused works."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from helpers.calibrating import QUICK
from helpers.commands import assert_refused, run_cli, save_model
from helpers.quiz import WORDS, make_questions
from helpers.small_models import load_small
from knn_moe import RoutingMemory
from knn_moe.adapt.compress import compress
from knn_moe.errors import (
    ConfigError,
    MemoryFormatError,
    MissingDependencyError,
    ReferenceSetError,
    TaskDataError,
    UnsupportedModelError,
)
from knn_moe.evaluation.evaluate import EvalConfig, evaluate
from knn_moe.evaluation.preflight import check_memory, check_model, check_plan
from knn_moe.index import IndexConfig
from knn_moe.methods import METHODS, TaskContext, check_method, prepare
from knn_moe.methods import knn_moe as knn_moe_method
from knn_moe.methods.embedding import VARIABLE
from knn_moe.methods.training_loop import TuneConfig
from knn_moe.tasks import Choice, Number, Program, Task, TaskData, Text
from knn_moe.tasks.task import SCORINGS

ROWS = 30  # of a reference set: enough for every method
TEXT = [{"text": f"{' '.join(WORDS)} {number}"} for number in range(ROWS + 4)]
SUMS = [{"question": f"{place} + 1?", "answer": str(place + 1)} for place in range(ROWS + 4)]
CODE = [
    {"prompt": f"Return {place}.", "code": f"def f():\n    return {place}", "tests": ["f()"]}
    for place in range(ROWS + 4)
]
TASKS = {
    "quiz": (Choice(), [*make_questions(4), *make_questions(ROWS, seed=1)]),
    "sums": (Number(), SUMS),
    "code": (Program(), CODE),
    "prose": (Text(), TEXT),
}
ONE_RATE = TuneConfig(learning_rates=(1e-3,), epochs=1)


def task_data(name: str, reference: int = ROWS) -> TaskData:
    kind, rows = TASKS[name]
    task = Task(name=name, title=name, kind=kind, files=name)
    return TaskData(task, list(rows[:4]), list(rows[4 : 4 + reference]), "made up")


def can_work(method: str, scoring: str, task: str) -> bool:
    """Say what goes together, written down a second time."""
    questions_only = ("5-shot", "c3po", "c3po-kernel", "c3po-mode")
    questions_only += ("sft-router-choices", "knn-right-answers")
    if scoring not in {"quiz": ("generation", "likelihood"), "prose": ("text",)}.get(
        task, ("generation",)
    ):
        return False
    return task != "prose" or method not in questions_only


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every task as a file, with its reference set beside it."""
    folder = tmp_path_factory.mktemp("tasks")
    for name in TASKS:
        data = task_data(name)
        for part, rows in ((name, data.test), (f"{name}_ref", data.reference)):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{part}.jsonl").write_text(text, encoding="utf8")
    return folder


@pytest.mark.parametrize(("method", "scoring"), list(product(METHODS, SCORINGS)))
def test_the_command_refuses_what_cannot_work_before_it_loads_a_model(
    method: str, scoring: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "own")
    for task in TASKS:
        place, output = files / f"{task}.jsonl", tmp_path / "out"
        chosen = ("-t", place, "-m", "zero-shot", "-m", method, "--scoring", scoring)
        result = run_cli("eval", "./nosuch", *chosen, "-o", output, "--run-code")
        if can_work(method, scoring, task):
            assert_refused(result, "There is no such folder")  # the model, which comes next
        elif scoring == "text" and task == "prose":
            assert_refused(result, f"{method} needs questions, and prose is plain text")
        else:
            assert_refused(result, f"{task} is scored by", f"not by {scoring}")
        assert not output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("scoring", SCORINGS)
def test_what_is_not_refused_works(
    scoring: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "own")
    monkeypatch.setattr(knn_moe_method, "CalibrationConfig", lambda **_: QUICK)
    monkeypatch.setattr("knn_moe.methods.sft.TuneConfig", lambda: ONE_RATE)
    model, tokenizer = load_small("tiny-olmoe")
    data = task_data("prose" if scoring == "text" else "quiz")
    config = EvalConfig(scoring=scoring, length=16, limit=3, max_new_tokens=2)
    context = TaskContext(model, tokenizer, data, scoring, length=16, preset="paper")
    for method in METHODS:  # in one context, where they share what they prepare
        if not can_work(method, scoring, data.task.name):
            for refuse in (
                partial(check_plan, [data], [(method, None)], config),
                partial(prepare, method, context),
            ):
                with pytest.raises(ConfigError, match=f"{method} needs questions, and prose is "):
                    refuse()
            continue
        check_plan([data], [(method, None)], config)
        asked = check_model(model, tokenizer, [data], [(method, None)], config)[data.task.name]
        prepared, folder = prepare(method, context), tmp_path / method
        run = evaluate(model, tokenizer, data, prepared, config, folder=folder, asked=asked)
        assert (run.method, run.facts["scoring"], len(run.samples)) == (method, scoring, 3)


def test_methods_say_how_many_reference_rows_they_need() -> None:
    for name, spec in METHODS.items():
        few = task_data("quiz", reference=spec.rows - 1)
        check_method(name, task_data("quiz", reference=spec.rows), "likelihood")
        if spec.rows > 1:
            for data, limit in ((few, None), (task_data("quiz"), spec.rows - 1)):
                with pytest.raises(ReferenceSetError, match=f"at least {spec.rows} reference row"):
                    check_method(name, data, "likelihood", limit)


def test_a_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knn_moe.methods.catalogue.find_spec", lambda name: None)
    data = task_data("quiz")
    with pytest.raises(MissingDependencyError, match=r"sft needs .* peft: pip install 'knn-moe\["):
        check_method("sft", data, "likelihood")
    with pytest.raises(MissingDependencyError, match="c3po needs the package sentence_transform"):
        check_method("c3po", data, "likelihood")
    monkeypatch.setenv(VARIABLE, "own")  # the model embeds questions itself
    check_method("c3po", data, "likelihood")


def test_a_missing_embedding_model_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no embedding model: modules.json is missing"):
        check_method("5-shot", task_data("quiz"), "likelihood")


def test_a_compressed_memory_is_used_as_it_was_compressed(
    zoo_memory: RoutingMemory, tmp_path: Path
) -> None:
    small = compress(zoo_memory, "fast", tmp_path / "small")
    for chosen in (("knn", None), ("knn", "random"), ("knn-paper", None), ("sft", None)):
        check_memory(small, [chosen])
    with pytest.raises(ConfigError, match="compressed as 'fast' and cannot be searched as 'ivfpq'"):
        check_memory(small, [("zero-shot", None), ("knn-ivfpq", None)])
    with pytest.raises(ConfigError, match="cannot be searched as 'exact'"):
        check_memory(small, [("knn", None)], IndexConfig(kind="exact"))
    for control in ("shuffled", "own-logits"):
        with pytest.raises(MemoryFormatError, match="has no keys"):
            check_memory(small, [("knn", control)])
        check_memory(zoo_memory, [("knn", control), ("knn-ivfpq", None)])


def test_a_model_that_a_method_does_not_suit_is_refused_before_the_first_run(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "own")
    model = save_model("dbrx", tmp_path / "dbrx")
    chosen = ("-t", files / "quiz.jsonl", "-m", "zero-shot", "-m", "c3po", "--device", "cpu")
    result = run_cli("eval", model, *chosen, "-o", tmp_path / "out", "--scoring", "likelihood")
    assert_refused(result, "cannot be run by themselves, as C3PO requires")
    assert not (tmp_path / "out").exists()


def test_a_task_that_is_too_long_is_refused_before_the_first_one_runs(tmp_path: Path) -> None:
    model, tokenizer = load_small("tiny-olmoe")
    model.config.max_position_embeddings = 64
    short, long = task_data("quiz"), task_data("sums")
    long.test[0] = {"question": "1 + 1? " * 64, "answer": "2"}
    with pytest.raises(TaskDataError, match="1 questions of sums are longer than the 64 tokens"):
        check_model(model, tokenizer, [short, long], [("zero-shot", None)], EvalConfig())
    wide = EvalConfig(length=4096)
    with pytest.raises(TaskDataError, match="fewer than a window of 4096"):
        check_model(model, tokenizer, [task_data("prose")], [("zero-shot", None)], wide)


def test_a_load_that_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> Any:
        raise UnsupportedModelError("no load")

    monkeypatch.setattr("knn_moe.evaluation.preflight.router_load", refuse)
    model, tokenizer = load_small("tiny-olmoe")
    with pytest.raises(UnsupportedModelError, match="no load"):
        check_model(model, tokenizer, [task_data("quiz")], [], EvalConfig(load=True))
    check_model(model, tokenizer, [task_data("quiz")], [], EvalConfig())
