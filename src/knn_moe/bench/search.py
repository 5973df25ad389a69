"""How long one layer's recall takes, by index, size and batch, against the exact search in one run.

It is measured from router input to mixed logits. On a GPU the calls are replayed from a CUDA graph
where they can be captured, over several layers in turn, so that neither launching nor a warm cache
is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.bench.floor import Rates, count_reads, measure_rates, search_floor
from knn_moe.bench.keys import made_up_keys, made_up_layer
from knn_moe.bench.timing import quickest, wait
from knn_moe.config import RoutingConfig
from knn_moe.errors import ConfigError, MissingDependencyError
from knn_moe.index import IndexConfig, build_index
from knn_moe.memory.layers import LayerMemory
from knn_moe.recall.layer import LayerRecall
from knn_moe.recall.neighbours import Widths
from knn_moe.support.progress import OnProgress, Progress, ignore_progress
from knn_moe.support.registry import unknown_name

EXACT: Final = IndexConfig()
_HELD_BYTES: Final = 2e8  # of the indexes searched in turn: more than a cache holds
_MOST_LAYERS: Final = 8
_QUERIES: Final = 512  # that recall is measured on


@dataclass(frozen=True, kw_only=True)
class SearchBench:
    """A benchmark of one layer's recall: what to measure."""

    width: int = 512
    experts: int = 64
    sizes: tuple[int, ...] = (100_000,)  # keys
    batches: tuple[int, ...] = (1, 64)
    k: int = 1
    indexes: tuple[IndexConfig, ...]  # besides the exact one, which is always measured
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class SearchMeasure:
    """What was measured of one index at one size, for one batch."""

    index: str
    keys: int
    batch: int
    microseconds: float
    exact_microseconds: float  # of the exact search, for the same
    floor_microseconds: float
    bound: str  # what decides the floor: bytes or sums
    recall: float  # of the exact search's nearest
    bytes_per_key: float  # without values
    build_seconds: float
    rates: Rates  # of this machine, which the floor follows from

    @property
    def times_exact(self) -> float:
        """How many times quicker than the exact search."""
        return self.exact_microseconds / self.microseconds

    @property
    def times_floor(self) -> float:
        """How many times slower than the floor."""
        return self.microseconds / self.floor_microseconds

    def to_dict(self) -> dict[str, Any]:
        ratios = {"times_exact": self.times_exact, "times_floor": self.times_floor}
        return {**asdict(self), **ratios, "rates": self.rates._asdict()}


def measure_search(
    bench: SearchBench, on_progress: OnProgress = ignore_progress
) -> Iterator[SearchMeasure]:
    """Measure the exact search, then every other index, for every batch, size by size."""
    indexes = list(dict.fromkeys((EXACT, *bench.indexes)))
    done, total = 0, len(bench.sizes) * len(indexes)
    on_progress(Progress("measuring this machine", done, total))
    rates = measure_rates(bench.device, bench.dtype)
    place: dict[str, Any] = {"device": bench.device, "dtype": bench.dtype}
    queries = made_up_keys(max(_QUERIES, *bench.batches), bench.width, seed=1, **place)
    for size in bench.sizes:
        layer = made_up_layer(made_up_keys(size, bench.width, seed=0, **place), bench.experts)
        exact_rows: Tensor | None = None
        exact_seconds: dict[int, float] = {}
        for index in indexes:
            name = f"{describe_index(index)}, {size:,} keys"
            on_progress(Progress(f"{name}: building", done, total))
            indexed = _IndexedLayer(layer, index, bench)
            rows = indexed.first.nearest(queries[:_QUERIES])[1][:, 0]
            exact_rows = rows if exact_rows is None else exact_rows
            recall = float((rows == exact_rows).float().mean())
            for batch in bench.batches:
                on_progress(Progress(f"{name}, batch {batch}", done, total))
                seconds = indexed.time(queries[:batch])
                exact = exact_seconds.setdefault(batch, seconds)
                yield indexed.measure(batch, seconds, exact, recall, rates)
            done += 1


class _IndexedLayer:
    """An index of one layer, and on a GPU of more layers like it, to search in turn."""

    def __init__(self, layer: LayerMemory, index: IndexConfig, bench: SearchBench) -> None:
        self.index, self.bench = index, bench
        started = time.perf_counter()
        self.first = _recall_of(layer, index, bench)
        wait(bench.device)
        self.build_seconds = time.perf_counter() - started
        self.reads = count_reads(self.first.index, index, layer.keys, bench.k)
        self.keys = len(layer)
        self.nbytes = sum(tensor.nbytes for tensor in self.first.index.tensors().values())
        self.layers = [self.first]
        if bench.device.type == "cuda":
            for shift in range(1, 1 + min(int(_HELD_BYTES // self.nbytes), _MOST_LAYERS - 1)):
                other = replace(layer, keys=layer.keys.roll(shift, 0))
                self.layers.append(_recall_of(other, index, bench))

    def time(self, queries: Tensor) -> float:
        """Return the seconds of a call. Shapes: queries [batch, d]."""
        logits = torch.randn(len(queries), self.bench.experts, device=self.bench.device)
        logits = logits.to(self.bench.dtype)

        def call_all() -> None:
            for layer in self.layers:
                layer(queries, logits)

        run = _capture(call_all) if self.bench.device.type == "cuda" else call_all
        return quickest(run, self.bench.device) / len(self.layers)

    def measure(
        self, batch: int, seconds: float, exact: float, recall: float, rates: Rates
    ) -> SearchMeasure:
        """Put together what was measured for one batch size."""
        floor = search_floor(self.reads, batch, rates)
        return SearchMeasure(
            index=describe_index(self.index),
            keys=self.keys,
            batch=batch,
            microseconds=seconds * 1e6,
            exact_microseconds=exact * 1e6,
            floor_microseconds=floor.seconds * 1e6,
            bound=floor.bound,
            recall=recall,
            bytes_per_key=self.nbytes / self.keys,
            build_seconds=self.build_seconds,
            rates=rates,
        )


def _recall_of(layer: LayerMemory, index: IndexConfig, bench: SearchBench) -> LayerRecall:
    config = RoutingConfig(k=bench.k, index=index)
    return LayerRecall(layer, Widths(layer.gamma, layer.gamma), config, bench.device)


def _capture(work: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of `work`, or `work` itself if it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return work
    return graph.replay


def describe_index(index: IndexConfig) -> str:
    """Return an index as `parse_index` reads it: its kind, and the options that are not default."""
    default = IndexConfig(kind=index.kind)
    options = [
        name if value is True else f"{name}={value}"
        for name, value in index.to_dict().items()
        if value != getattr(default, name)
    ]
    return ",".join([index.kind, *options])


def parse_index(spec: str) -> IndexConfig:
    """Read an index such as "fast,dims=128,value_bits=4" or "ivfpq,rerank".

    Raises:
        ConfigError: The kind or an option is unknown, given twice, or has a wrong value.
    """
    kind, *parts = (part.strip() for part in spec.split(","))
    names = [field.name for field in fields(IndexConfig) if field.name != "kind"]
    options: dict[str, Any] = {}
    for part in parts:
        name, _, text = (word.strip() for word in part.partition("="))
        if name not in names:
            raise ConfigError(unknown_name("index option", name, names))
        if name in options:
            raise ConfigError(f"The index {spec!r} sets {name} twice.")
        if name == "rerank" and "=" in part:
            raise ConfigError(f"rerank takes no value, got {part!r}. Leave it out to turn it off.")
        if name != "rerank" and not text.isdecimal():
            raise ConfigError(f"{name} of index {spec!r} must be a whole number, got {text!r}.")
        options[name] = True if name == "rerank" else int(text)
    return IndexConfig(kind=kind, **options)


def missing_dependency(kind: str) -> str | None:
    """Return what this kind of index needs and is not installed; None if it works."""
    try:
        build_index(torch.eye(2, 8), IndexConfig(kind=kind), torch.device("cpu"))
    except MissingDependencyError as error:
        return str(error)
    return None
