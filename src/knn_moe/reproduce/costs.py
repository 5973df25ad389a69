"""Tables of what the methods cost: time to prepare, time to answer, memory (§6.5)."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from knn_moe.adapt.compress import compress
from knn_moe.evaluation.evaluate import prepare_questions
from knn_moe.index import IndexConfig
from knn_moe.inference.attach import attach
from knn_moe.memory.memory import RoutingMemory
from knn_moe.methods import METHODS
from knn_moe.methods.knn_moe import PAPER, routing_memory
from knn_moe.reproduce.results import by_benchmark
from knn_moe.reproduce.study import Study
from knn_moe.reproduce.table import (
    Cell,
    Chart,
    Series,
    Table,
    make_row,
    no_value,
    number,
    values_of,
)
from knn_moe.tasks.answers import make_answer

INDEXES: Final = {"exact": "kNN-MoE", "ivfpq": "kNN-MoE (IVFPQ)", "fast": "kNN-MoE (fast)"}
FAISS: Final = ("ivfpq",)  # indexes whose memory torch does not count
TIMED: Final = 8  # questions or windows
ROUNDS: Final = 3


def construction_time(study: Study) -> Table:
    """Make Table 7: seconds to prepare each method on the same reference set."""
    columns = {
        title: seconds
        for title, (name, seconds) in _time_columns(study).items()
        if METHODS[name].installed
    }

    def cells(model: str, task: str) -> list[Cell]:
        return [seconds(study, model, task) for seconds in columns.values()]

    return replace(
        by_benchmark(study, list(columns), cells, "seconds"),
        name="construction-time",
        title="Construction time",
        notes=(
            "Seconds to prepare on the reference set. One training is three epochs at one learning "
            "rate; a search tries three rates or more. IVFPQ: its index, in addition to the "
            "memory. The first 5-shot and C3PO runs also load their embedding model.",
        ),
    )


Seconds = Callable[[Study, str, str], Cell]


def _time_columns(study: Study) -> dict[str, tuple[str, Seconds]]:
    """Return for each column its method and the function that finds its seconds."""
    columns: dict[str, tuple[str, Seconds]] = {}
    columns["5-shot"] = ("5-shot", partial(_preparation, "5-shot"))
    for name in ("sft", "sft-router"):
        title = METHODS[name].title
        columns[f"{title}, one training"] = (name, partial(_one_training, name))
        columns[f"{title}, search"] = (name, partial(_preparation, name))
    for name in study.choose_methods(("knn-paper", "knn")):
        columns[METHODS[name].title] = (name, partial(_preparation, name))
    columns[METHODS["knn-ivfpq"].title] = ("knn-ivfpq", _ivfpq_index)
    for name in ("knn-lm", "c3po"):
        columns[METHODS[name].title] = (name, partial(_preparation, name))
    return columns


def _preparation(method: str, study: Study, model: str, task: str) -> Cell:
    if not study.is_defined(method, task):
        return no_value()
    return number(study.run(model, task, method).facts.get("preparation_seconds"), ".1f")


def _one_training(method: str, study: Study, model: str, task: str) -> Cell:
    facts = study.run(model, task, method).facts
    rates = len(facts["method_facts"]["validation_losses"])
    return number(facts["preparation_seconds"] / rates, ".1f")


def _ivfpq_index(study: Study, model: str, task: str) -> Cell:
    return number(study.run(model, task, "knn-ivfpq").facts.get("attach_seconds"), ".1f")


def inference_speed(study: Study) -> Table:
    """Make Table 8: seconds per example, by the size of the reference set and by index."""

    def measure(model: str, task: str) -> Mapping[str, float]:
        found: Mapping[str, float] = study.measure(
            model, task, "speed", partial(_speeds, study, model, task)
        )
        return found

    return replace(
        _by_size(study, study.plan.swept, measure, ".4f", "seconds per example"),
        name="inference-speed",
        title="Inference speed by reference set size",
        notes=(
            f"Seconds per example, for at most {TIMED} of them, in batches; the median of {ROUNDS} "
            f"rounds after one that does not count. 0 % is zero-shot, timed alongside.",
        ),
    )


def memory_use(study: Study) -> Table:
    """Make Table 9: memory in use while answering, by the size of the reference set."""
    tasks = study.plan.swept[-1:]

    def measure(model: str, task: str) -> Mapping[str, float]:
        found = study.measure(model, task, "held", partial(_bytes_held, study, model, task))
        return {name: count / 1e6 for name, count in found.items()}

    return replace(
        _by_size(study, tasks, measure, ",.1f", "MB"),
        name="memory-use",
        title="Memory by reference set size",
        notes=(
            "MB of the model's weights and of the attached memory. On a GPU this is what torch "
            "allocates; a FAISS index counts by what it stores, wherever it lies.",
        ),
    )


def _by_size(
    study: Study,
    tasks: Sequence[str],
    measure: Callable[[str, str], Mapping[str, float]],
    form: str,
    axis: str,
) -> Table:
    """Return a table with a row for each size and a column for each index, without its name."""
    rows, charts = [], []
    shares = (0.0, *study.plan.sizes)
    labels = tuple(f"{share:.0%}" for share in shares)
    for model in study.plan.models:
        for task in tasks:
            found, title = measure(model, task), study.title(task)
            columns = {
                kind: [number(found.get(f"{kind}-{share:g}"), form) for share in shares]
                for kind in INDEXES
            }
            rows += [
                make_row(model, title, label, *cells)
                for label, *cells in zip(labels, *columns.values(), strict=True)
            ]
            series = tuple(Series(INDEXES[kind], values_of(x)) for kind, x in columns.items())
            charts.append(Chart("lines", labels, series, axis, f"{model}, {title}"))
    return Table(
        name="",
        title="",
        columns=("model", "benchmark", "reference", *INDEXES.values()),
        rows=tuple(rows),
        charts=tuple(charts),
        facts=study.facts(tasks),
    )


def _speeds(study: Study, model: str, task: str) -> dict[str, float]:
    """Measure seconds per example by index and share."""
    network, _ = study.model(model)
    found = {}
    for share, kind, memory in _memories(study, model, task):
        routing = _attach(network, memory, kind)
        found[f"{kind}-{share:g}"] = _seconds_per_example(study, model, task, routing)
    alone = _seconds_per_example(study, model, task, nullcontext())
    return {**{f"{kind}-0": alone for kind in INDEXES}, **found}


def _memories(study: Study, model: str, task: str) -> Iterator[tuple[float, str, RoutingMemory]]:
    for share in study.plan.sizes:
        memory = routing_memory(study.context(model, task, share), PAPER)
        for kind in INDEXES:
            if kind not in FAISS or METHODS["knn-ivfpq"].installed:
                yield share, kind, memory


def _attach(network: Any, memory: RoutingMemory, kind: str) -> AbstractContextManager[Any]:
    config = replace(memory.routing, index=IndexConfig(kind=kind), stats=False)
    return attach(network, memory, config)


def _seconds_per_example(
    study: Study, model: str, task: str, routing: AbstractContextManager[Any]
) -> float:
    network, tokenizer = study.model(model)
    data, config = study.data(task), replace(study.eval_config(task), limit=TIMED)
    asked = prepare_questions(tokenizer, data, config)
    answer, spent = make_answer(network, tokenizer, data.task, asked.scoring), []
    with routing:
        for _ in range(ROUNDS + 1):
            started = time.perf_counter()
            for batch_number, batch in enumerate(asked.batches):
                answer(batch, batch_number)
            spent.append(time.perf_counter() - started)
    return median(spent[1:]) / len(asked.questions)


def _bytes_held(study: Study, model: str, task: str) -> dict[str, int]:
    """Measure the bytes of the model and of the attached memory, by index and share."""
    network, _ = study.model(model)
    weights = sum(parameter.nbytes for parameter in network.parameters())
    found = {f"{kind}-0": weights for kind in INDEXES}
    for share, kind, memory in _memories(study, model, task):
        if study.device.type != "cuda" or kind in FAISS:
            found[f"{kind}-{share:g}"] = weights + _bytes_stored(memory, kind)
            continue
        before = _allocated(study.device)
        with _attach(network, memory, kind):
            found[f"{kind}-{share:g}"] = weights + _allocated(study.device) - before
    return found


def _bytes_stored(memory: RoutingMemory, kind: str) -> int:
    """Return the bytes that an index stores, which it also holds in memory once attached."""
    if kind == "exact":
        return memory.nbytes
    with tempfile.TemporaryDirectory() as folder:
        return compress(memory, kind, Path(folder) / "memory").nbytes


def _allocated(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
