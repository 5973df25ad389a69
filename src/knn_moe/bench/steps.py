"""What a memory costs a running model: decode steps, prefill and memory, against the model alone.

Published shapes with random weights, a memory of the model's own router inputs on every layer, in
one run. The baseline is the model well run: a static cache, and torch.compile with CUDA graphs
where compiled.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import nn

from knn_moe.bench.floor import wait
from knn_moe.bench.keys import own_memory
from knn_moe.bench.models import SHAPES, random_model
from knn_moe.bench.search import describe
from knn_moe.config import RoutingConfig
from knn_moe.errors import ConfigError
from knn_moe.index import IndexConfig
from knn_moe.inference.attach import attach
from knn_moe.memory.memory import RoutingMemory

ALONE: Final = "model alone"
_PROMPT: Final = 32  # tokens in the cache before the first step
_WARM: Final = 5  # steps before the clock runs
_STEPS: Final = 20  # timed together
_ROUNDS: Final = 5  # of which the median counts
_TRIES: Final = 2  # of all that, of which the quicker counts
_TURNS: Final = 2  # of each way of eager decoding


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """What to measure."""

    shape: str
    layers: int | None = None  # of the published depth; None: all
    keys: int = 200_000  # a layer
    k: int = 1
    indexes: tuple[IndexConfig, ...]
    batches: tuple[int, ...] = (1, 64)
    prefill: int = 8192
    compiled: bool = True
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"Unknown shape {self.shape!r}. Available: {', '.join(SHAPES)}.")
        if self.layers is not None and not 1 <= self.layers <= self.depth:
            raise ConfigError(f"{self.shape} has 1 to {self.depth} layers, got {self.layers}.")
        for name in ("keys", "k", "prefill"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")

    @property
    def depth(self) -> int:
        """As published."""
        depth: int = SHAPES[self.shape][1]["num_hidden_layers"]
        return depth

    @property
    def eager(self) -> tuple[int, ...]:
        """Batches decoded eagerly: the first, or all where nothing is compiled."""
        return self.batches[:1] if self.compiled else self.batches


@dataclass(frozen=True, kw_only=True)
class StepMeasure:
    """One kind of step, with one index or none."""

    what: str
    index: str
    milliseconds: float
    alone_milliseconds: float  # of the model alone, for the same step
    gigabytes: float | None  # that torch has allocated at rest, attached; None on a CPU
    alone_gigabytes: float | None

    @property
    def times_alone(self) -> float:
        return self.milliseconds / self.alone_milliseconds

    @property
    def memory_times_alone(self) -> float | None:
        if self.gigabytes is None or self.alone_gigabytes is None:
            return None
        return self.gigabytes / self.alone_gigabytes

    def to_dict(self) -> dict[str, Any]:
        ratios = {"times_alone": self.times_alone, "memory_times_alone": self.memory_times_alone}
        return {**asdict(self), **ratios}


def measure_steps(bench: StepBench, on_step: Callable[[str], None]) -> Iterator[StepMeasure]:
    """The model alone, then with each index; eager decoding in turns, since a CPU's pace varies."""
    on_step("model")
    model = random_model(bench.shape, bench.device, bench.dtype, layers=bench.layers)
    memory = own_memory(model, bench.keys, on_step)
    configs: dict[str, RoutingConfig | None] = {ALONE: None}
    for index in bench.indexes:
        configs[describe(index)] = RoutingConfig(k=bench.k, index=index)
    alone: dict[str, float] = {}
    held: dict[str, float | None] = {}

    def measure(what: str, name: str, seconds: float) -> StepMeasure:
        return StepMeasure(
            what=what,
            index=name,
            milliseconds=seconds * 1e3,
            alone_milliseconds=alone.setdefault(what, seconds) * 1e3,
            gigabytes=held[name],
            alone_gigabytes=held[ALONE],
        )

    for name, config in configs.items():
        on_step(f"{name}: attaching")
        before = _allocated(bench.device)
        with attached(model, memory, config):
            added = _allocated(bench.device) - before
            # Caches and graphs of earlier steps may still lie there: what attaching adds counts.
            total = held.get(ALONE) or before / 1e9
            held[name] = total + added / 1e9 if bench.device.type == "cuda" else None
            for what, seconds in _steps(model, bench, name, on_step):
                yield measure(what, name, seconds)
    for (what, name), seconds in _eager_in_turns(model, memory, configs, bench, on_step).items():
        yield measure(what, name, seconds)


@contextmanager
def attached(
    model: nn.Module, memory: RoutingMemory, config: RoutingConfig | None
) -> Iterator[None]:
    """The memory on the model for a while; without a config, the model alone."""
    if config is None:
        yield
        return
    with attach(model, memory, config):
        yield


def _steps(
    model: Any, bench: StepBench, name: str, on_step: Callable[[str], None]
) -> Iterator[tuple[str, float]]:
    what = f"prefill of {bench.prefill:,} tokens"
    on_step(f"{name}: {what}")
    yield what, _prefill(model, bench)
    if not bench.compiled:
        return
    for batch in bench.batches:
        what = f"decode, batch {batch}, compiled"
        on_step(f"{name}: {what}")
        torch.compiler.reset()
        compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
        yield what, min(_decode(compiled, model, batch, bench) for _ in range(_TRIES))
    torch.compiler.reset()  # what was compiled holds on to the index


@torch.no_grad()
def _prefill(model: Any, bench: StepBench) -> float:
    ids = _ids(model, (1, bench.prefill), bench.device)
    spent = []
    for _ in range(_ROUNDS + 1):
        wait(bench.device)
        started = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        wait(bench.device)
        spent.append(time.perf_counter() - started)
    return sorted(spent[1:])[_ROUNDS // 2]


@torch.no_grad()
def _decode(run: Any, model: Any, batch: int, bench: StepBench) -> float:
    """Seconds a step: the median of a few rounds of steps without waiting in between."""
    from transformers import StaticCache

    length = _PROMPT + _WARM + _ROUNDS * _STEPS + 1
    cache = StaticCache(config=model.config, max_cache_len=-(-length // 64) * 64)
    ids = _ids(model, (batch, _PROMPT), bench.device)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, -1:].clone()
    for _ in range(_WARM):
        run(token, past_key_values=cache, use_cache=True)
    spent = []
    for _ in range(_ROUNDS):
        wait(bench.device)
        started = time.perf_counter()
        for _ in range(_STEPS):
            run(token, past_key_values=cache, use_cache=True)
        wait(bench.device)
        spent.append((time.perf_counter() - started) / _STEPS)
    return sorted(spent)[_ROUNDS // 2]


def _eager_in_turns(
    model: Any,
    memory: RoutingMemory,
    configs: Mapping[str, RoutingConfig | None],
    bench: StepBench,
    on_step: Callable[[str], None],
) -> dict[tuple[str, str], float]:
    """Seconds by step and index, each several times in turn: the least, the least disturbed."""
    turns: dict[tuple[str, str], list[float]] = {}
    for turn in range(_TURNS):
        for name, config in configs.items():
            on_step(f"{name}: attaching")
            with attached(model, memory, config):
                for batch in bench.eager:
                    what = f"decode, batch {batch}, eager"
                    on_step(f"{name}: {what}, turn {turn + 1}")
                    spent = [_decode(model, model, batch, bench) for _ in range(_TRIES)]
                    turns.setdefault((what, name), []).extend(spent)
    return {key: min(seconds) for key, seconds in turns.items()}


def _ids(model: Any, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    draw = torch.Generator(device=device).manual_seed(0)
    return torch.randint(3, model.config.vocab_size, shape, generator=draw, device=device)


def _allocated(device: torch.device) -> int:
    """Bytes that torch has given out on the device; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
