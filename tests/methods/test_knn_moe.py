"""kNN-MoE as a method: memories that are shared, saved, found again, and calibrated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from helpers.calibrating import QUICK, sayings
from helpers.text_task import TEXT_TASK, make_text_context, text_data
from knn_moe.errors import KnnMoeError
from knn_moe.methods import KnnMoe, TaskContext, calibrated, prepare
from knn_moe.methods.knn_moe import routing_memory
from knn_moe.tasks import TaskData


@pytest.fixture
def text_context(zoo_olmoe: PreTrainedModel, zoo_tokenizer: Any) -> TaskContext:
    return make_text_context(zoo_olmoe, zoo_tokenizer)


def test_a_saved_memory_is_found_again(text_context: TaskContext, tmp_path: Path) -> None:
    built = prepare("knn", replace(text_context, folder=tmp_path))
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    before = (folder / "memory_config.json").stat().st_mtime_ns
    found = prepare("knn", replace(text_context, folder=tmp_path, _cache={}))
    assert (folder / "memory_config.json").stat().st_mtime_ns == before
    assert isinstance(found.method, KnnMoe)
    assert len(found.method.memory) == len(built.method.memory)  # type: ignore[attr-defined]
    # The time of the first build counts.
    clock = float((tmp_path / f"seconds-of-{folder.name}").read_text(encoding="utf8"))
    assert found.seconds >= clock > 0


def test_a_memory_of_another_reference_set_is_not_reused(
    text_context: TaskContext, tmp_path: Path
) -> None:
    routing_memory(replace(text_context, folder=tmp_path))
    other = text_data(seed=2)
    with pytest.raises(KnnMoeError, match="exists already"):
        routing_memory(replace(text_context, data=other, folder=tmp_path, _cache={}))


def test_a_given_memory_serves_all_but_the_papers_preset(text_context: TaskContext) -> None:
    given = routing_memory(text_context)
    context = replace(text_context, memory=given, preset="strong", _cache={})
    assert prepare("knn", context).method.memory is given  # type: ignore[attr-defined]
    assert prepare("knn-paper", context).method.memory is not given  # type: ignore[attr-defined]


def test_a_memory_of_a_secret_task_is_not_saved(text_context: TaskContext, tmp_path: Path) -> None:
    data = replace(text_context.data, task=replace(TEXT_TASK, secret=True))
    routing_memory(replace(text_context, data=data, folder=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_calibrated_memory_is_shared_by_its_methods(
    text_context: TaskContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "CalibrationConfig", lambda **more: replace(QUICK, **more))
    data = TaskData(TEXT_TASK, [], [{"text": text} for text in sayings(30)], "made up")
    context = replace(text_context, data=data, limit=None)
    alone, both, head = (
        prepare(name, context)
        for name in ("knn-calibrated", "knn-calibrated+knn-lm", "knn-calibrated+head")
    )
    assert isinstance(alone.method, KnnMoe)
    assert isinstance(head.method, KnnMoe)
    assert head.method.memory is alone.method.memory
    found = alone.method.facts()["calibration"]
    assert found["targets"]
    assert found == alone.method.memory.manifest.calibration
    assert both.method.facts()["knn-calibrated"]["calibration"] == found
    assert min(alone.seconds, both.seconds) >= context._cache["memory-calibrated"][1] > 0
