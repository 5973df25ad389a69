"""How long a layer's recall takes, by index, size and batch, against the exact search, in one run.

A layer alone, from router input to mixed logits. On a GPU the calls are replayed from a CUDA graph
where they can be captured, over several layers in turn, so that neither launching nor a warm cache
is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.bench.floor import Rates, Reads, floor_seconds, measure_rates, reads_of, wait
from knn_moe.bench.keys import made_up_keys, made_up_layer
from knn_moe.config import RoutingConfig
from knn_moe.errors import ConfigError, MissingDependencyError
from knn_moe.index import IndexConfig, build_index
from knn_moe.memory.memory import LayerMemory
from knn_moe.recall.recall import LayerRecall, Widths

EXACT: Final = IndexConfig()
_HELD: Final = 2e8  # bytes of indexes in turn, at the least: more than a cache holds
_MOST_LAYERS: Final = 8
_ASKED: Final = 512  # queries that recall is measured on
_SECONDS: Final = 1.0  # that calls are timed for
_ROUNDS: Final = (5, 200)  # of all calls, at the least and at the most


@dataclass(frozen=True, kw_only=True)
class SearchBench:
    """What to measure."""

    width: int = 512
    experts: int = 64
    sizes: tuple[int, ...] = (100_000,)  # keys
    batches: tuple[int, ...] = (1, 64)
    k: int = 1
    indexes: tuple[IndexConfig, ...]  # beside the exact one, which is always measured
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class SearchMeasure:
    """One index at one size, for one batch."""

    index: str
    keys: int
    batch: int
    microseconds: float
    exact_microseconds: float  # of the exact search, for the same
    floor_microseconds: float
    bound: str  # what the floor comes from: bytes or sums
    recall: float  # of the exact search's nearest
    bytes_per_key: float  # of the index, without values
    build_seconds: float
    rates: Rates  # of this machine, that the floor is worked out from

    @property
    def times_exact(self) -> float:
        """How many times quicker than the exact search."""
        return self.exact_microseconds / self.microseconds

    @property
    def times_floor(self) -> float:
        """How many times slower than it could be."""
        return self.microseconds / self.floor_microseconds

    def to_dict(self) -> dict[str, Any]:
        ratios = {"times_exact": self.times_exact, "times_floor": self.times_floor}
        return {**asdict(self), **ratios, "rates": self.rates._asdict()}


def measure_search(bench: SearchBench, on_step: Callable[[str], None]) -> Iterator[SearchMeasure]:
    """The exact search, then every other index, for every batch, size by size."""
    on_step("what this machine can do")
    rates = measure_rates(bench.device, bench.dtype)
    for size in bench.sizes:
        on_step(f"keys: {size:,}")
        where: dict[str, Any] = {"device": bench.device, "dtype": bench.dtype}
        asked = max(_ASKED, *bench.batches)
        queries = made_up_keys(asked, bench.width, seed=1, **where)
        layer = made_up_layer(made_up_keys(size, bench.width, seed=0, **where), bench.experts)
        nearest: Tensor | None = None
        exact: dict[int, float] = {}
        for index in dict.fromkeys((EXACT, *bench.indexes)):
            on_step(f"{describe(index)}, {size:,} keys: building")
            built = _Built(layer, index, bench)
            found = built.first.nearest(queries[:_ASKED])[1][:, 0]
            nearest = found if nearest is None else nearest
            recall = float((found == nearest).float().mean())
            for batch in bench.batches:
                on_step(f"{describe(index)}, {size:,} keys, batch {batch}")
                spent = built.time(queries[:batch])
                exact.setdefault(batch, spent)
                yield built.measured(batch, spent, exact[batch], recall, rates)


class _Built:
    """An index of one layer, and on a GPU of more layers like it, to search in turn."""

    def __init__(self, layer: LayerMemory, index: IndexConfig, bench: SearchBench) -> None:
        self.index, self.bench = index, bench
        started = time.perf_counter()
        self.first = _recall_of(layer, index, bench)
        wait(bench.device)
        self.seconds = time.perf_counter() - started
        self.reads: Reads = reads_of(self.first.index, index, layer.keys, bench.k)
        self.keys = len(layer)
        self.size = sum(tensor.nbytes for tensor in self.first.index.tensors().values())
        self.layers = [self.first]
        if bench.device.type == "cuda":
            for shift in range(1, 1 + min(int(_HELD // self.size), _MOST_LAYERS - 1)):
                other = replace(layer, keys=layer.keys.roll(shift, 0))
                self.layers.append(_recall_of(other, index, bench))

    def time(self, queries: Tensor) -> float:
        """Seconds a call. Shapes: queries [batch, d]."""
        logits = torch.randn(len(queries), self.bench.experts, device=self.bench.device)
        logits = logits.to(self.bench.dtype)
        calls = [partial(layer, queries, logits) for layer in self.layers]
        return time_calls(calls, self.bench.device)

    def measured(
        self, batch: int, seconds: float, exact: float, recall: float, rates: Rates
    ) -> SearchMeasure:
        floor = floor_seconds(self.reads, batch, rates)
        return SearchMeasure(
            index=describe(self.index),
            keys=self.keys,
            batch=batch,
            microseconds=seconds * 1e6,
            exact_microseconds=exact * 1e6,
            floor_microseconds=floor.seconds * 1e6,
            bound=floor.bound,
            recall=recall,
            bytes_per_key=self.size / self.keys,
            build_seconds=self.seconds,
            rates=rates,
        )


def _recall_of(layer: LayerMemory, index: IndexConfig, bench: SearchBench) -> LayerRecall:
    config = RoutingConfig(k=bench.k, index=index)
    return LayerRecall(layer, Widths.single(layer.gamma), config, bench.device)


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Seconds a call, in the quickest of many rounds: others may have had the cores in the rest."""

    def round_() -> None:
        for call in calls:
            call()

    run = _captured(round_) if device.type == "cuda" else round_
    spent: list[float] = []
    least, most = _ROUNDS
    end = time.perf_counter() + _SECONDS
    while len(spent) < least or (time.perf_counter() < end and len(spent) < most):
        wait(device)
        started = time.perf_counter()
        run()
        wait(device)
        spent.append((time.perf_counter() - started) / len(calls))
    return min(spent)


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """Replays of a CUDA graph of `work`, or `work` itself where it cannot be captured."""
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


def describe(index: IndexConfig) -> str:
    """A kind, and what of it is not as usual, as `parse_index` reads it."""
    usual = IndexConfig(kind=index.kind)
    unusual = [
        name if value is True else f"{name}={value}"
        for name, value in index.to_dict().items()
        if value != getattr(usual, name)
    ]
    return ",".join([index.kind, *unusual])


def parse_index(spec: str) -> IndexConfig:
    """An index from words such as "fast,dims=128,value_bits=4" or "ivfpq,rerank"."""
    kind, *parts = (part.strip() for part in spec.split(","))
    names = [field.name for field in fields(IndexConfig) if field.name != "kind"]
    options: dict[str, Any] = {}
    for part in parts:
        name, _, text = (word.strip() for word in part.partition("="))
        if name not in names:
            raise ConfigError(
                f"Unknown setting {name!r} of index {spec!r}. Available: {', '.join(names)}."
            )
        if name in options:
            raise ConfigError(f"The index {spec!r} sets {name} twice.")
        if name == "rerank" and "=" in part:
            raise ConfigError(f"rerank takes no value, got {part!r}: leave it out for none.")
        if name != "rerank" and not text.isdecimal():
            raise ConfigError(f"{name} of index {spec!r} must be a whole number, got {text!r}.")
        options[name] = True if name == "rerank" else int(text)
    return IndexConfig(kind=kind, **options)


def why_missing(kind: str) -> str | None:
    """What this kind of index lacks here, and the cure; None where it works."""
    try:
        build_index(torch.eye(2, 8), IndexConfig(kind=kind), torch.device("cpu"))
    except MissingDependencyError as error:
        return str(error)
    return None
