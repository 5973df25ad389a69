"""What a memory costs a running model: decode steps, prefill and memory, against the model alone.

The model has a published shape and random weights; its memory holds its own router inputs, on every
layer. The baseline is the model at its best: a static cache, and torch.compile with CUDA graphs for
compiled steps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import nn

from knn_moe.bench.keys import record_memory
from knn_moe.bench.models import SHAPES, random_model
from knn_moe.bench.timing import time_once
from knn_moe.bench.uses import Attached, Use
from knn_moe.errors import ConfigError
from knn_moe.memory.memory import RoutingMemory
from knn_moe.support.progress import OnProgress, Progress, ignore_progress

ALONE: Final = "model alone"
_PROMPT: Final = 32  # tokens in the cache before the first step
_WARM_UP: Final = 5  # steps before timing starts
_STEPS: Final = 20  # timed together
_ROUNDS: Final = 5  # of which the median counts
_TRIES: Final = 2  # of all rounds, of which the quicker counts
_TURNS: Final = 2  # for each use in eager decoding


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """A benchmark of a running model: what to measure."""

    shape: str
    layers: int | None = None  # of the published depth; None: all
    keys: int = 200_000  # a layer
    uses: tuple[Use, ...]
    batches: tuple[int, ...] = (1, 64)
    prefill: int = 8192
    compiled: bool = True
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        depth = SHAPES.find(self.shape).depth
        if self.layers is not None and not 1 <= self.layers <= depth:
            raise ConfigError(f"layers must be 1 to {depth} for {self.shape}, got {self.layers}.")
        for use in self.uses:
            if (use.prototypes or 0) > self.keys:
                raise ConfigError(
                    f"A memory of {self.keys:,} keys has no {use.prototypes:,} prototypes. Give "
                    f"fewer --prototypes, or more --keys."
                )
        for name in ("keys", "prefill"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")

    @property
    def depth(self) -> int:
        """How many layers the model has."""
        return self.layers or SHAPES[self.shape].depth

    @property
    def eager(self) -> tuple[int, ...]:
        """Batch sizes decoded eagerly: the first, or all if nothing is compiled."""
        return self.batches[:1] if self.compiled else self.batches


@dataclass(frozen=True, kw_only=True)
class StepMeasure:
    """What was measured of one kind of step, with one use of the memory or none."""

    what: str
    memory: str  # how it is used
    milliseconds: float
    alone_milliseconds: float  # of the model alone, for the same step
    gigabytes: float | None  # that torch has allocated between steps; None on a CPU
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


def measure_steps(
    bench: StepBench, on_progress: OnProgress = ignore_progress
) -> Iterator[StepMeasure]:
    """Measure the model alone, then with each use of the memory.

    Eager decoding is measured in turns, since the pace of a CPU varies.
    """
    on_progress(Progress("making the model", 0, 1))
    model = random_model(bench.shape, bench.device, bench.dtype, layers=bench.layers)
    memory = record_memory(model, bench.keys, on_progress)
    uses: dict[str, Use | None] = {ALONE: None} | {use.name: use for use in bench.uses}
    alone: dict[str, float] = {}
    held: dict[str, float | None] = {}

    def measure(what: str, name: str, seconds: float) -> StepMeasure:
        return StepMeasure(
            what=what,
            memory=name,
            milliseconds=seconds * 1e3,
            alone_milliseconds=alone.setdefault(what, seconds) * 1e3,
            gigabytes=held[name],
            alone_gigabytes=held[ALONE],
        )

    for done, (name, use) in enumerate(uses.items()):
        on_progress(Progress(f"{name}: prefill and compiled steps", done, len(uses)))
        before = _allocated(bench.device)
        with _attach(model, memory, use) as attached:
            added = _allocated(bench.device) - before
            # Caches and graphs of earlier steps may still be held: count what attaching adds.
            total = held.get(ALONE) or before / 1e9
            held[name] = total + added / 1e9 if bench.device.type == "cuda" else None
            for what, seconds in _prefill_and_compiled(model, bench, attached):
                yield measure(what, name, seconds)
    eager = _eager_in_turns(model, memory, uses, bench, on_progress)
    for (what, name), seconds in eager.items():
        yield measure(what, name, seconds)


def _attach(model: nn.Module, memory: RoutingMemory, use: Use | None) -> Attached:
    return Attached() if use is None else use.attach(model, memory)


def _prefill_and_compiled(
    model: Any, bench: StepBench, attached: Attached
) -> Iterator[tuple[str, float]]:
    with attached.rows(1):
        yield f"prefill of {bench.prefill:,} tokens", _prefill(model, bench)
    if not bench.compiled:
        return
    for batch in bench.batches:
        torch.compiler.reset()
        compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
        with attached.rows(batch):
            seconds = min(_decode(compiled, model, batch, bench) for _ in range(_TRIES))
        yield f"decode, batch {batch}, compiled", seconds
    torch.compiler.reset()  # compiled graphs hold on to the memory


@torch.no_grad()
def _prefill(model: Any, bench: StepBench) -> float:
    ids = _ids(model, (1, bench.prefill), bench.device)
    spent = [
        time_once(lambda: model(ids, use_cache=True, logits_to_keep=1), bench.device)
        for _ in range(_ROUNDS + 1)
    ]
    return sorted(spent[1:])[_ROUNDS // 2]


@torch.no_grad()
def _decode(run: Any, model: Any, batch: int, bench: StepBench) -> float:
    """Return the seconds of a step: the median of a few rounds of steps."""
    from transformers import StaticCache

    length = _PROMPT + _WARM_UP + _ROUNDS * _STEPS + 1
    cache = StaticCache(config=model.config, max_cache_len=-(-length // 64) * 64)
    ids = _ids(model, (batch, _PROMPT), bench.device)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, -1:].clone()
    for _ in range(_WARM_UP):
        run(token, past_key_values=cache, use_cache=True)

    def steps() -> None:
        for _ in range(_STEPS):
            run(token, past_key_values=cache, use_cache=True)

    spent = [time_once(steps, bench.device) / _STEPS for _ in range(_ROUNDS)]
    return sorted(spent)[_ROUNDS // 2]


def _eager_in_turns(
    model: Any,
    memory: RoutingMemory,
    uses: Mapping[str, Use | None],
    bench: StepBench,
    on_progress: OnProgress,
) -> dict[tuple[str, str], float]:
    """Return seconds by step and use: the least of several turns, the least disturbed."""
    turns: dict[tuple[str, str], list[float]] = {}
    for turn in range(_TURNS):
        for place, (name, use) in enumerate(uses.items()):
            done, total = turn * len(uses) + place, _TURNS * len(uses)
            on_progress(Progress(f"{name}: eager steps", done, total))
            with _attach(model, memory, use) as attached:
                for batch in bench.eager:
                    what = f"decode, batch {batch}, eager"
                    with attached.rows(batch):
                        spent = [_decode(model, model, batch, bench) for _ in range(_TRIES)]
                    turns.setdefault((what, name), []).extend(spent)
    return {key: min(seconds) for key, seconds in turns.items()}


def _ids(model: Any, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    draw = torch.Generator(device=device).manual_seed(0)
    return torch.randint(3, model.config.vocab_size, shape, generator=draw, device=device)


def _allocated(device: torch.device) -> int:
    """Return the bytes that torch has allocated on the device; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
