"""How fast a memory is built, against a plain implementation, in one run.

The baseline is what one would write first: one sequence at a time, `eager` experts, the same
optimisation. "Model only" runs the library's own batches and discards the result; "end to end" adds
tokenising, writing to disk, γ and checksums.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from knn_moe.bench.models import SHAPES, number_tokenizer, random_model, random_texts
from knn_moe.bench.timing import wait
from knn_moe.build.build import build_memory
from knn_moe.build.optimise import optimise_routing
from knn_moe.config import BuildConfig
from knn_moe.reference.examples import Example
from knn_moe.reference.windows import ReferenceTokens, make_batch, plan_batches, read_tokens
from knn_moe.routers.find import find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import freeze
from knn_moe.support.progress import OnProgress, Progress, ignore_progress


@dataclass(frozen=True)
class BuildMeasure:
    """What was measured of one way to build."""

    way: str
    sequences: int
    tokens: int
    seconds: float
    peak_gb: float
    disk_gb: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)  # where the seconds went

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, kw_only=True)
class BuildBench:
    """A benchmark of building: what to measure."""

    shape: str = "small"
    sequences: int = 1000
    length: int = 32
    plain_sequences: int = 20  # for the plain implementation; ratios are per token
    device: torch.device
    dtype: torch.dtype
    config: BuildConfig
    folder: Path | None = None  # where memories are written and deleted again


def measure_build(
    bench: BuildBench, growth: tuple[int, ...], on_progress: OnProgress = ignore_progress
) -> list[BuildMeasure]:
    """Measure the plain implementation, the model only, and end to end, also at other sizes."""
    model = random_model(bench.shape, bench.device, bench.dtype)
    vocabulary = SHAPES[bench.shape].vocabulary
    tokenizer = number_tokenizer(vocabulary)
    texts = random_texts(max(bench.sequences, *growth, 0), bench.length, vocabulary)
    gpu = bench.device.type == "cuda"
    counter, total = itertools.count(), 4 + gpu + len(growth)

    def start(stage: str) -> None:
        on_progress(Progress(stage, next(counter), total))

    start("warm-up")
    _model_only(model, _read(texts[:64], tokenizer, bench.config), bench)
    start("plain")
    results = [_plain(model, _read(texts[: bench.plain_sequences], tokenizer, bench.config), bench)]
    tokens = _read(texts[: bench.sequences], tokenizer, bench.config)
    if gpu:
        start("model only, transformers' experts")
        results.append(_own_experts(model, tokens, bench))
    start("model only")
    results.append(_model_only(model, tokens, bench))
    for count in (bench.sequences, *growth):
        start(f"end to end, {count:,} sequences")
        results.append(_end_to_end(model, tokenizer, texts[:count], bench))
    return results


def _plain(model: Any, reference: ReferenceTokens, bench: BuildBench) -> BuildMeasure:
    before = model.config._experts_implementation
    model.set_experts_implementation("eager")
    try:
        batches = [[window] for window in range(len(reference.lengths))]
        return _optimise("plain: one sequence at a time, eager", model, reference, batches, bench)
    finally:
        model.set_experts_implementation(before)


def _own_experts(model: nn.Module, reference: ReferenceTokens, bench: BuildBench) -> BuildMeasure:
    """Run our batches on transformers' own grouped experts."""
    batches = list(plan_batches(reference.lengths, bench.config.batch_tokens))
    return _optimise("model only, transformers' experts", model, reference, batches, bench)


def _model_only(model: nn.Module, reference: ReferenceTokens, bench: BuildBench) -> BuildMeasure:
    with use_grouped_experts(model):
        batches = list(plan_batches(reference.lengths, bench.config.batch_tokens))
        return _optimise("model only", model, reference, batches, bench)


def _optimise(
    way: str,
    model: nn.Module,
    reference: ReferenceTokens,
    batches: list[list[int]],
    bench: BuildBench,
) -> BuildMeasure:
    routers = find_routers(model)
    with freeze(model), _stopwatch(bench.device) as watch:
        for windows in batches:
            batch = make_batch(reference, windows)
            optimise_routing(model, routers, batch.to(bench.device), bench.config)
    tokens = int(reference.lengths.sum())
    return BuildMeasure(way, len(reference.lengths), tokens, watch.seconds, watch.peak_gb)


def _end_to_end(
    model: nn.Module, tokenizer: Any, texts: list[str], bench: BuildBench
) -> BuildMeasure:
    marks: dict[str, float] = {}

    def read() -> Iterator[str]:
        yield from texts
        marks["read"] = time.perf_counter()

    def note(progress: Any) -> None:
        if progress.stage.startswith("seal"):
            marks.setdefault("optimise", time.perf_counter())

    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        target = Path(scratch) / "memory"
        with _stopwatch(bench.device) as watch:
            memory = build_memory(
                model, tokenizer, read(), bench.config, folder=target, on_progress=note
            )
        size = memory.nbytes / 1e9
    stages = {
        "read": marks["read"] - watch.start,
        "optimise and write": marks["optimise"] - marks["read"],
        "seal": watch.start + watch.seconds - marks["optimise"],
    }
    way = "end to end, memory on disk"
    measured = (len(memory), watch.seconds, watch.peak_gb, size, stages)
    return BuildMeasure(way, len(texts), *measured)


def _read(texts: list[str], tokenizer: Any, config: BuildConfig) -> ReferenceTokens:
    examples = (Example.of(text) for text in texts)
    return read_tokens(examples, tokenizer, config, config.max_length)


@dataclass
class _Watch:
    start: float = 0.0
    seconds: float = 0.0
    peak_gb: float = 0.0


@contextmanager
def _stopwatch(device: torch.device) -> Iterator[_Watch]:
    """Measure wall time, and peak memory of the GPU or of the process."""
    watch = _Watch()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    wait(device)
    watch.start = time.perf_counter()
    yield watch
    wait(device)
    watch.seconds = time.perf_counter() - watch.start
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_resident()
    watch.peak_gb = peak / 1e9


def _peak_resident() -> int:
    """Return bytes, including mapped pages of the memory's own files."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
