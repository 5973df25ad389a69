"""Methods by name: what they share, how long it took, and what they were prepared on."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from transformers import PreTrainedModel

from helpers.text_task import make_text_context
from knn_moe.adapt.controls import CONTROLS
from knn_moe.errors import ConfigError
from knn_moe.methods import METHODS, KnnMoe, TaskContext, ZeroShot, prepare, prepared_on
from knn_moe.methods.knn_moe import routing_memory


@pytest.fixture
def text_context(zoo_olmoe: PreTrainedModel, zoo_tokenizer: Any) -> TaskContext:
    return make_text_context(zoo_olmoe, zoo_tokenizer)


def test_every_name_leads_to_a_function() -> None:
    for name, spec in METHODS.items():
        module, _, function = spec.prepare.partition(":")
        assert callable(getattr(import_module(f"knn_moe.methods.{module}"), function)), name


def test_a_shared_part_is_made_once_and_its_time_counts_for_each(
    text_context: TaskContext,
) -> None:
    first = prepare("knn", text_context)
    again = prepare("knn-ivfpq", text_context)
    assert isinstance(first.method, KnnMoe)
    assert isinstance(again.method, KnnMoe)
    assert first.method.memory is again.method.memory
    assert again.method.name == "knn-ivfpq"
    seconds = text_context._cache["memory-paper"][1]
    assert min(first.seconds, again.seconds) >= seconds > 0
    assert prepare("zero-shot", text_context).seconds < seconds


def test_what_a_method_was_prepared_on(text_context: TaskContext) -> None:
    assert prepared_on("zero-shot", text_context) == {}
    facts = prepared_on("knn", text_context)
    assert (facts["reference"], facts["rows"], facts["preset"]) == (3, 6, "paper")
    assert prepare("knn", text_context).prepared_on == facts
    given = replace(text_context, memory=routing_memory(text_context))
    assert given.facts()["memory"] != facts["memory"]


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_of_a_memory(control: str, text_context: TaskContext) -> None:
    method = prepare("knn", text_context, control).method
    assert isinstance(method, KnnMoe)
    assert method.name == f"knn-{control}"
    assert method.facts()["control"] == control
    assert method.memory is not routing_memory(text_context)


def test_unknown_names_and_controls_without_a_memory(text_context: TaskContext) -> None:
    with pytest.raises(ConfigError, match=r"Unknown method 'knn-ivf'. Did you mean 'knn-ivfpq'\?"):
        prepare("knn-ivf", text_context)
    with pytest.raises(ConfigError, match="'zero-shot' has no routing memory"):
        prepare("zero-shot", text_context, "shuffled")
    assert type(prepare("zero-shot", text_context).method) is ZeroShot
