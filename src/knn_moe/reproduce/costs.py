"""Tables of what the methods cost: time to prepare, time to answer, memory held (§6.5)."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
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
from knn_moe.methods.knn_moe import routing_memory
from knn_moe.reproduce.results import by_benchmark
from knn_moe.reproduce.study import Study
from knn_moe.reproduce.table import Cell, Chart, Series, Table, nothing, number, row, values
from knn_moe.tasks.answers import make_answer

INDEXES: Final = {"exact": "kNN-MoE", "ivfpq": "kNN-MoE (IVFPQ)", "fast": "kNN-MoE (fast)"}
FAISS: Final = ("ivfpq",)  # whose memory torch does not see
TIMED: Final = 8  # questions or windows
ROUNDS: Final = 3


def construction_time(study: Study) -> Table:
    """Table 7: seconds to prepare each method on the same reference set."""
    columns = {
        title: seconds
        for title, (name, seconds) in _columns(study).items()
        if METHODS[name].installed
    }

    def cells(model: str, task: str) -> list[Cell]:
        return [seconds(study, model, task) for seconds in columns.values()]

    return replace(
        by_benchmark(study, list(columns), cells, "seconds"),
        name="construction-time",
        title="Construction time",
        notes=(
            "Seconds to prepare on the reference set. One training: three epochs at one learning "
            "rate; a search has three rates or more. IVFPQ: its index, beyond the memory. The "
            "first 5-shot and C3PO also load their embedding model.",
        ),
    )


Seconds = Callable[[Study, str, str], Cell]


def _columns(study: Study) -> dict[str, tuple[str, Seconds]]:
    """What is shown, of which method, and where its seconds are."""
    found: dict[str, tuple[str, Seconds]] = {}
    found["5-shot"] = ("5-shot", partial(_prepared, "5-shot"))
    for name in ("sft", "sft-router"):
        title = METHODS[name].title
        found[f"{title}, one training"] = (name, partial(_one_training, name))
        found[f"{title}, search"] = (name, partial(_prepared, name))
    for name in study.methods(("knn-paper", "knn")):
        found[METHODS[name].title] = (name, partial(_prepared, name))
    found[METHODS["knn-ivfpq"].title] = ("knn-ivfpq", _index_of_ivfpq)
    for name in ("knn-lm", "c3po"):
        found[METHODS[name].title] = (name, partial(_prepared, name))
    return found


def _prepared(method: str, study: Study, model: str, task: str) -> Cell:
    if not study.defined(method, task):
        return nothing()
    return number(study.run(model, task, method).facts.get("preparation_seconds"), ".1f")


def _one_training(method: str, study: Study, model: str, task: str) -> Cell:
    facts = study.run(model, task, method).facts
    rates = len(facts["method_facts"]["validation_losses"])
    return number(facts["preparation_seconds"] / rates, ".1f")


def _index_of_ivfpq(study: Study, model: str, task: str) -> Cell:
    return number(study.run(model, task, "knn-ivfpq").facts.get("attach_seconds"), ".1f")


def inference_speed(study: Study) -> Table:
    """Table 8: seconds an example, by the size of the reference set and by index."""
    rows, charts = [], []
    shares = (0.0, *study.plan.sizes)
    for model in study.plan.models:
        for task in study.plan.swept:
            found = study.measured(model, task, "speed", partial(_speeds, study, model, task))
            cells = {
                (share, kind): number(found.get(f"{kind}-{share:g}"), ".4f")
                for share in shares
                for kind in INDEXES
            }
            for share in shares:
                shown = (cells[share, kind] for kind in INDEXES)
                rows.append(row(model, study.title(task), f"{share:.0%}", *shown))
            charts.append(
                Chart(
                    "lines",
                    tuple(f"{share:.0%}" for share in shares),
                    tuple(
                        Series(title, values([cells[share, kind] for share in shares]))
                        for kind, title in INDEXES.items()
                    ),
                    "seconds an example",
                    f"{model}, {study.title(task)}",
                )
            )
    return Table(
        name="inference-speed",
        title="Inference speed by reference set size",
        columns=("model", "benchmark", "reference", *INDEXES.values()),
        rows=tuple(rows),
        notes=(
            f"Seconds an example, of {TIMED} at the most, in batches; the median of {ROUNDS} "
            f"rounds after one that does not count. 0 % is zero-shot, timed beside them.",
        ),
        charts=tuple(charts),
        facts=study.facts(study.plan.swept),
    )


def _speeds(study: Study, model: str, task: str) -> dict[str, float]:
    """Seconds an example by index and share; nothing else is measured meanwhile."""
    network, _ = study.model(model)
    found = {}
    for share, kind, memory in _attached(study, model, task):
        found[f"{kind}-{share:g}"] = _seconds(study, model, task, _on(network, memory, kind))
    alone = _seconds(study, model, task, nullcontext())
    return {**{f"{kind}-0": alone for kind in INDEXES}, **found}


def _attached(study: Study, model: str, task: str) -> Iterator[tuple[float, str, RoutingMemory]]:
    for share in study.plan.sizes:
        memory = routing_memory(study.context(model, task, share))
        for kind in INDEXES:
            if kind not in FAISS or METHODS["knn-ivfpq"].installed:
                yield share, kind, memory


def _on(network: Any, memory: RoutingMemory, kind: str) -> AbstractContextManager[Any]:
    config = replace(memory.routing, index=IndexConfig(kind=kind), stats=False)
    return attach(network, memory, config)


def _seconds(study: Study, model: str, task: str, on: AbstractContextManager[Any]) -> float:
    network, tokenizer = study.model(model)
    data, config = study.data(task), replace(study.config(task), limit=TIMED)
    asked = prepare_questions(tokenizer, data, config)
    answer, spent = make_answer(network, tokenizer, data.task, asked.scoring), []
    with on:
        for _ in range(ROUNDS + 1):
            started = time.perf_counter()
            for number_of, batch in enumerate(asked.batches):
                answer(batch, number_of)
            spent.append(time.perf_counter() - started)
    return median(spent[1:]) / len(asked.questions)


def memory_use(study: Study) -> Table:
    """Table 9: what lies in memory while answering, by the size of the reference set."""
    rows, charts = [], []
    shares = (0.0, *study.plan.sizes)
    tasks = study.plan.swept[-1:]
    for model in study.plan.models:
        for task in tasks:
            held = study.measured(model, task, "held", partial(_held, study, model, task))
            cells = {
                (share, kind): number(_mega(held.get(f"{kind}-{share:g}")), ",.1f")
                for share in shares
                for kind in INDEXES
            }
            for share in shares:
                rows.append(row(model, f"{share:.0%}", *(cells[share, kind] for kind in INDEXES)))
            series = tuple(
                Series(title, values([cells[share, kind] for share in shares]))
                for kind, title in INDEXES.items()
            )
            heads = tuple(f"{share:.0%}" for share in shares)
            charts.append(Chart("lines", heads, series, "MB", model))
    return Table(
        name="memory-use",
        title="Memory by reference set size",
        columns=("model", "reference", *INDEXES.values()),
        rows=tuple(rows),
        notes=(
            f"MB of the model's weights and of the attached memory, of "
            f"{', '.join(study.title(task) for task in tasks)}. On a GPU what torch allocates "
            f"there; an index of FAISS by what it stores, wherever it lies.",
        ),
        charts=tuple(charts),
        facts=study.facts(tasks),
    )


def _mega(count: float | None) -> float | None:
    return None if count is None else count / 1e6


def _held(study: Study, model: str, task: str) -> dict[str, int]:
    """Bytes of the model and of what is attached to it, by index and share."""
    network, _ = study.model(model)
    weights = sum(parameter.nbytes for parameter in network.parameters())
    found = {f"{kind}-0": weights for kind in INDEXES}
    for share, kind, memory in _attached(study, model, task):
        if study.device.type != "cuda" or kind in FAISS:
            found[f"{kind}-{share:g}"] = weights + _stored(memory, kind)
            continue
        before = _allocated(study.device)
        with _on(network, memory, kind):
            found[f"{kind}-{share:g}"] = weights + _allocated(study.device) - before
    return found


def _stored(memory: RoutingMemory, kind: str) -> int:
    """Bytes of what an index keeps, which is what lies in memory once it is attached."""
    if kind == "exact":
        return memory.nbytes
    with tempfile.TemporaryDirectory() as folder:
        return compress(memory, kind, Path(folder) / "memory").nbytes


def _allocated(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
