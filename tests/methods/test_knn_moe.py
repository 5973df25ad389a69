"""kNN-MoE as a method: memories that are shared, saved, found again, and calibrated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from helpers.calibrating import QUICK, sayings
from helpers.text_task import TEXT_TASK, make_text_context, text_data
from knn_moe.errors import KnnMoeError, ReferenceSetError
from knn_moe.methods import KnnMoe, TaskContext, prepare
from knn_moe.methods import knn_moe as knn_moe_method
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


def test_a_given_memory_is_used_as_it_is(text_context: TaskContext) -> None:
    given = routing_memory(text_context)
    context = replace(text_context, memory=given, preset=None, notes=[], _cache={})
    for name in ("knn", "knn-paper"):
        method = prepare(name, context).method
        assert isinstance(method, KnnMoe)
        assert (method.name, method.memory) == (name, given)
    assert context.notes == ["knn-paper uses the memory that was given, as knn does."]


def test_with_too_few_examples_the_papers_preset_is_used_and_a_note_says_so(
    text_context: TaskContext,
) -> None:
    context = replace(text_context, preset=None, notes=[], _cache={})
    knn, paper, again = (prepare(name, context) for name in ("knn", "knn-paper", "knn"))
    assert knn.method.memory is paper.method.memory  # type: ignore[attr-defined]
    assert knn.method.facts()["build"]["learning_rate"] == 0.02
    assert again.method.name == "knn"
    (note,) = context.notes
    assert note.startswith("kNN-MoE uses the preset 'paper' on numbers: 24 different examples")
    with pytest.raises(ReferenceSetError, match=r"at least 24 reference rows, .* have 3 of num"):
        prepare("knn-calibrated", context)


def test_a_memory_of_a_secret_task_is_not_saved(text_context: TaskContext, tmp_path: Path) -> None:
    data = replace(text_context.data, task=replace(TEXT_TASK, secret=True))
    routing_memory(replace(text_context, data=data, folder=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_calibrated_memory_is_shared_by_its_methods(
    text_context: TaskContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn_moe_method, "CalibrationConfig", lambda **more: replace(QUICK, **more))
    data = TaskData(TEXT_TASK, [], [{"text": text} for text in sayings(30)], "made up")
    context = replace(text_context, data=data, limit=None, preset=None)
    alone, both, head, knn = (
        prepare(name, context)
        for name in ("knn-calibrated", "knn-calibrated+knn-lm", "knn-calibrated+head", "knn")
    )
    assert isinstance(alone.method, KnnMoe)
    assert isinstance(head.method, KnnMoe)
    assert isinstance(knn.method, KnnMoe)
    assert head.method.memory.layers is alone.method.memory.layers
    assert knn.method.memory.layers is alone.method.memory.layers
    assert knn.method.memory.routing.head is None
    found = alone.method.facts()["calibration"]
    assert found["trials"]
    whole = alone.method.memory.manifest.calibration
    # Not the times: a run is resumed by a memory of the same facts.
    assert whole.keys() - found.keys() == {"seconds", "seconds_by_part"}
    assert found.items() <= whole.items()
    assert both.method.facts()["knn-calibrated"]["calibration"] == found
    assert (
        min(alone.seconds, both.seconds, knn.seconds) >= context._cache["memory-calibrated"][1] > 0
    )
