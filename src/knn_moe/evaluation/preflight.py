"""Refuse an evaluation that cannot be finished, before anything of it runs.

`check_plan` and `check_memory` need no model, `check_model` needs it loaded. Each error says in one
sentence what does not go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn

from knn_moe.adapt.controls import CONTROLS
from knn_moe.evaluation.evaluate import EvalConfig, QuestionSet, check_lengths, prepare_questions
from knn_moe.index import IndexConfig
from knn_moe.inference.expert_usage import router_load
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.memory import RoutingMemory
from knn_moe.methods import METHODS, check_method
from knn_moe.methods import check_model as check_method_on_model
from knn_moe.methods.catalogue import MEMORY
from knn_moe.recall.distilled import check_use
from knn_moe.recall.layer import index_of
from knn_moe.tasks.data import TaskData

Chosen: TypeAlias = tuple[str, str | None]  # a method's name, and a control of its memory


def check_plan(
    tasks: Sequence[TaskData],
    methods: Sequence[Chosen],
    config: EvalConfig,
    reference: int | None = None,
) -> None:
    """Refuse methods, tasks and scorings that do not go together.

    Args:
        reference: At most so many reference rows of each task are used. None: all.

    Raises:
        KnnMoeError: A task does not support the scoring, or a method cannot answer a task.
    """
    for data in tasks:
        scoring = config.usual_scoring(data)  # whether it is text does not depend on the model
        for name, _ in methods:
            check_method(name, data, scoring, reference)


def check_memory(
    memory: RoutingMemory, methods: Sequence[Chosen], index: IndexConfig | None = None
) -> None:
    """Refuse methods that cannot use a memory as it was compressed.

    Args:
        index: How the memory will be searched. None: as it says itself.

    Raises:
        ConfigError: The memory was compressed for another index.
        MemoryFormatError: A control needs the keys of a memory that has none.
    """
    for name, control in methods:
        if METHODS.find(name).needs != MEMORY:
            continue
        wanted = IndexConfig(kind="ivfpq") if name == "knn-ivfpq" else index
        routing = memory.routing if wanted is None else replace(memory.routing, index=wanted)
        for layer in memory.layers.values():
            if isinstance(layer, CompressedLayer):
                index_of(layer, routing)
            if isinstance(layer, DistilledLayer):
                check_use(routing)
        if control is not None and CONTROLS.find(control).needs_keys:
            memory.full_layers()


def check_model(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[TaskData],
    methods: Sequence[Chosen],
    config: EvalConfig,
) -> dict[str, QuestionSet]:
    """Refuse methods, tasks and measurements that do not suit a model.

    Returns:
        The questions of each task, by its name, as `evaluate` takes them.

    Raises:
        KnnMoeError: A method does not suit the model, its routers do not tell their load, or a
            question is empty or longer than the model can read.
    """
    if config.load:
        with router_load(model):
            pass
    for name in dict.fromkeys(name for name, _ in methods):
        check_method_on_model(name, model)
    asked = {data.task.name: prepare_questions(tokenizer, data, config) for data in tasks}
    for data in tasks:
        check_lengths(model, data, asked[data.task.name])
    return asked
