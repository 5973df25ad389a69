"""Tables of what the methods cost: time to prepare, time to answer, memory held (§6.5)."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from knn_moe.compression import compress
from knn_moe.evaluation.runs import Run
from knn_moe.handle import attach
from knn_moe.index import IndexConfig
from knn_moe.memory import RoutingMemory
from knn_moe.methods import METHODS, KnnMoe
from knn_moe.methods.knn_moe import routing_memory
from knn_moe.reproduce.results import BASE
from knn_moe.reproduce.study import Study
from knn_moe.reproduce.table import Cell, Chart, Series, Table, number, row, values
from knn_moe.routers import input_device

PREPARED: Final = ("5-shot", "sft", "sft-router", "knn-paper", "knn", "knn-lm", "c3po")
INDEXES: Final = {"exact": "kNN-MoE", "ivfpq": "kNN-MoE (IVFPQ)", "fast": "kNN-MoE (fast)"}


def construction_time(study: Study) -> Table:
    """Table 7: seconds to prepare each method on the same reference set."""
    rows, charts = [], []
    for model in study.models:
        series = []
        for task in study.plan.tasks:
            cells = [_prepared(study, model, task, method) for method in PREPARED]
            rows.append(row(model, study.title(task), *cells))
            series.append(Series(study.title(task), values(cells)))
        heads = tuple(METHODS[method].title for method in PREPARED)
        charts.append(Chart("bars", heads, tuple(series), "seconds", model))
    return Table(
        name="construction-time",
        title="Construction time",
        columns=("model", "benchmark", *(METHODS[method].title for method in PREPARED)),
        rows=tuple(rows),
        notes=(
            "Seconds to prepare on the reference set. Fine-tuning: the whole search for a learning "
            "rate, three epochs each.",
        ),
        charts=tuple(charts),
        facts=study.facts(study.plan.tasks),
    )


def _prepared(study: Study, model: str, task: str, method: str) -> Cell:
    if not study.defined(method, task):
        return Cell("-")
    seconds = study.run(model, task, method).facts.get("preparation_seconds")
    return number(seconds, ".1f")


def inference_speed(study: Study) -> Table:
    """Table 8: seconds an example, by the size of the reference set and by index."""
    rows, charts = [], []
    shares = (0.0, *study.plan.sizes)
    for model in study.models:
        for task in study.plan.ablation:
            found: dict[str, list[Cell]] = {title: [] for title in INDEXES.values()}
            for share in shares:
                for kind, title in INDEXES.items():
                    run = _indexed(study, model, task, share, kind)
                    found[title].append(number(_seconds(run), ".4f"))
            for place, share in enumerate(shares):
                cells = [cells[place] for cells in found.values()]
                rows.append(row(model, study.title(task), f"{share:.0%}", *cells))
            series = tuple(Series(title, values(cells)) for title, cells in found.items())
            heads = tuple(f"{share:.0%}" for share in shares)
            title = f"{model}, {study.title(task)}"
            charts.append(Chart("lines", heads, series, "seconds an example", title))
    return Table(
        name="inference-speed",
        title="Inference speed by reference set size",
        columns=("model", "benchmark", "reference", *INDEXES.values()),
        rows=tuple(rows),
        notes=("Seconds an example, answered in batches; 0 % is zero-shot.",),
        charts=tuple(charts),
        facts=study.facts(study.plan.ablation),
    )


def _indexed(study: Study, model: str, task: str, share: float, kind: str) -> Run:
    """With part of the reference set, searched by an index."""
    if share == 0:
        return study.run(model, task, BASE)
    make = partial(_searched, study, model, task, share, kind)
    return study.variant(model, task, f"knn-{study.plan.preset}-{kind}-{share:g}", make)


def _searched(study: Study, model: str, task: str, share: float, kind: str) -> KnnMoe:
    memory = routing_memory(study.setting(model, task, share))
    return KnnMoe(memory, replace(memory.routing, index=IndexConfig(kind=kind)))


def _seconds(run: Run) -> float:
    return float(run.facts["seconds"]) / len(run.samples)


def memory_use(study: Study) -> Table:
    """Table 9: what lies in memory while answering, by the size of the reference set."""
    rows, charts = [], []
    shares = (0.0, *study.plan.sizes)
    task = study.plan.ablation[-1]
    for model in study.models:
        found: dict[str, list[Cell]] = {title: [] for title in INDEXES.values()}
        for share in shares:
            for kind, title in INDEXES.items():
                measure = partial(_held, study, model, task, share, kind)
                held = study.measured(model, task, f"memory-{kind}-{share:g}", measure)
                found[title].append(number(held / 1e6, ",.1f"))
        for place, share in enumerate(shares):
            rows.append(row(model, f"{share:.0%}", *(cells[place] for cells in found.values())))
        series = tuple(Series(title, values(cells)) for title, cells in found.items())
        heads = tuple(f"{share:.0%}" for share in shares)
        charts.append(Chart("lines", heads, series, "MB", model))
    return Table(
        name="memory-use",
        title="Memory by reference set size",
        columns=("model", "reference", *INDEXES.values()),
        rows=tuple(rows),
        notes=(
            f"MB of the model's weights and of the attached memory, of {study.title(task)}; on a "
            "GPU what torch has allocated there.",
        ),
        charts=tuple(charts),
        facts=study.facts([task]),
    )


def _held(study: Study, model: str, task: str, share: float, kind: str) -> float:
    """Bytes of the model and what is attached to it."""
    network, _ = study.model(model)
    weights: int = sum(parameter.nbytes for parameter in network.parameters())
    if share == 0:
        return weights
    memory = routing_memory(study.setting(model, task, share))
    device = input_device(network)
    if device.type != "cuda":
        return weights + _stored(memory, kind)
    before = _allocated(device)
    with attach(network, memory, replace(memory.routing, index=IndexConfig(kind=kind))):
        return weights + _allocated(device) - before


def _stored(memory: RoutingMemory, kind: str) -> int:
    """Bytes of what an index keeps, which is what lies in RAM once it is attached."""
    if kind == "exact":
        return memory.nbytes
    with tempfile.TemporaryDirectory() as folder:
        return compress(memory, kind, Path(folder) / "memory").nbytes


def _allocated(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
