"""Methods by name: what is shared between them, what it took, and what is found again on disk."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from helpers.quiz import make_questions
from helpers.tiny import model, tokenizer  # noqa: F401
from knn_moe.errors import ConfigError, KnnMoeError
from knn_moe.evaluation.compare import Line
from knn_moe.methods import METHODS, KnnMoe, Method, TaskContext, ZeroShot, prepare, prepared_on
from knn_moe.methods.knn_moe import routing_memory
from knn_moe.reproduce.results import BETTER, WORSE, mark
from knn_moe.support.statistics import Accuracy, Comparison
from knn_moe.tasks import Choice, Task, TaskData


@pytest.fixture
def context(model: PreTrainedModel, tokenizer: Any) -> TaskContext:
    task = Task(name="quiz", title="Quiz", kind=Choice(), files="quiz")
    data = TaskData(task, make_questions(4), make_questions(6, seed=1), "made up")
    return TaskContext(model, tokenizer, data, "likelihood", limit=3, preset="paper")


def test_every_name_leads_to_a_function() -> None:
    for name, entry in METHODS.items():
        module, _, function = entry.prepare.partition(":")
        assert callable(getattr(import_module(f"knn_moe.methods.{module}"), function)), name


def test_what_is_shared_is_made_once_and_counts_for_each(context: TaskContext) -> None:
    first = prepare("knn", context)
    again = prepare("knn-ivfpq", context)
    assert isinstance(first.method, KnnMoe)
    assert isinstance(again.method, KnnMoe)
    assert first.method.memory is again.method.memory
    assert again.method.name == "knn-ivfpq"
    took = context._cache["memory-paper"][1]
    assert min(first.seconds, again.seconds) >= took > 0
    assert prepare("zero-shot", context).seconds < took


def test_a_memory_is_found_again(context: TaskContext, tmp_path: Path) -> None:
    kept = replace(context, folder=tmp_path)
    built = prepare("knn", kept)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    before = (folder / "memory_config.json").stat().st_mtime_ns
    found = prepare("knn", replace(context, folder=tmp_path, _cache={}))
    assert (folder / "memory_config.json").stat().st_mtime_ns == before
    assert isinstance(found.method, KnnMoe)
    assert len(found.method.memory) == len(built.method.memory)  # type: ignore[attr-defined]
    # What it took then is what it takes.
    clock = float((tmp_path / f"seconds-of-{folder.name}").read_text(encoding="utf8"))
    assert found.seconds >= clock > 0


def test_another_references_memory_is_not_taken_for_it(
    context: TaskContext, tmp_path: Path
) -> None:
    routing_memory(replace(context, folder=tmp_path))
    rows = make_questions(6, seed=2)
    other = TaskData(context.data.task, context.data.test, rows, "made up")
    with pytest.raises(KnnMoeError, match="exists already"):
        routing_memory(replace(context, data=other, folder=tmp_path, _cache={}))


def test_a_given_memory_serves_all_but_the_papers_setting(context: TaskContext) -> None:
    given = routing_memory(context)
    with_it = replace(context, memory=given, preset="strong", _cache={})
    assert prepare("knn", with_it).method.memory is given  # type: ignore[attr-defined]
    assert prepare("knn-paper", with_it).method.memory is not given  # type: ignore[attr-defined]


def test_a_calibrated_memory_is_shared_with_the_head_beside_it(context: TaskContext) -> None:
    task = context.data.task
    data = TaskData(task, context.data.test, make_questions(40, seed=1), "made up")
    many = replace(context, data=data, limit=None)
    alone = prepare("knn-calibrated", many)
    both = prepare("knn-calibrated+knn-lm", many)
    assert isinstance(alone.method, KnnMoe)
    found = alone.method.facts()["calibration"]
    assert len(found["targets"]) == 8
    assert found == alone.method.memory.manifest.calibration
    assert both.method.facts()["knn-calibrated"]["calibration"] == found
    assert min(alone.seconds, both.seconds) >= many._cache["memory-calibrated"][1] > 0


def test_what_a_method_was_prepared_on(context: TaskContext) -> None:
    assert prepared_on("zero-shot", context) == {}
    facts = prepared_on("knn", context)
    assert (facts["reference"], facts["rows"], facts["preset"]) == (3, 6, "paper")
    assert prepare("knn", context).prepared_on == facts
    given = replace(context, memory=routing_memory(context))
    assert given.facts()["memory"] != facts["memory"]


def test_of_a_secret_task_no_memory_is_kept(context: TaskContext, tmp_path: Path) -> None:
    task = replace(context.data.task, secret=True)
    data = replace(context.data, task=task)
    routing_memory(replace(context, data=data, folder=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_are_told(context: TaskContext) -> None:
    with pytest.raises(ConfigError, match=r"Unknown method 'knn-ivf'. Did you mean 'knn-ivfpq'\?"):
        prepare("knn-ivf", context)
    assert type(prepare("zero-shot", context).method) is ZeroShot
    assert isinstance(ZeroShot(), Method)


@pytest.mark.parametrize(
    ("difference", "p", "accuracy", "loss"),
    [
        (0.1, 0.01, BETTER, WORSE),
        (-0.1, 0.01, WORSE, BETTER),
        (0.1, 0.2, "", ""),
        (0, 0.01, "", ""),
    ],
)
def test_marks_say_which_way(difference: float, p: float, accuracy: str, loss: str) -> None:
    change = Comparison(difference, difference - 0.1, difference + 0.1, p)
    line = Line(
        task="a", title="A", method="b", scoring="text", items=9, score=Accuracy(0.5, 0.4, 0.6, 9),
        nll=1.0, unparsed=0, near_ties=0, change=change, nll_change=change,
    )  # fmt: skip
    assert mark(line) == accuracy
    assert mark(line, lower_is_better=True) == loss
