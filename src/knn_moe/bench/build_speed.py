"""How fast a memory is built, against the plain way, in one run.

The baseline is what one would write first: one sequence at a time, `eager` experts, the same
optimisation. The model-only figure runs the library's own batches and throws the result away;
end to end adds tokenising, streaming to disk, γ and checksums.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from knn_moe.bench.models import SHAPES, number_tokenizer, random_model, random_texts
from knn_moe.build.build import BuildProgress, build_memory
from knn_moe.build.optimise import optimise_routing
from knn_moe.config import BuildConfig
from knn_moe.reference.examples import Example
from knn_moe.reference.windows import ReferenceTokens, make_batch, plan_batches, read_tokens
from knn_moe.routers.find import find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import freeze


@dataclass(frozen=True)
class BuildMeasure:
    """One way of building: how much, how long, how much memory."""

    way: str
    sequences: int
    tokens: int
    seconds: float
    peak_gb: float
    disk_gb: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)  # of the seconds, where they went

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, kw_only=True)
class BuildBench:
    """What to measure."""

    shape: str = "small"
    sequences: int = 1000
    length: int = 32
    plain_sequences: int = 20  # measured the plain way; the ratio is per token
    device: torch.device
    dtype: torch.dtype
    config: BuildConfig
    folder: Path | None = None  # where memories are written, and deleted again


def measure_build(
    bench: BuildBench, growth: tuple[int, ...], on_step: Callable[[str], None]
) -> list[BuildMeasure]:
    """The plain way, the model alone, end to end, and end to end at growing sizes."""
    model = random_model(bench.shape, bench.device, bench.dtype)
    vocabulary = SHAPES[bench.shape][1]["vocab_size"]
    tokenizer = number_tokenizer(vocabulary)
    texts = random_texts(max(bench.sequences, *growth, 0), bench.length, vocabulary)
    on_step("warm-up")
    _model_only(model, _read(texts[:64], tokenizer, bench.config), bench)
    on_step("plain")
    results = [_plain(model, _read(texts[: bench.plain_sequences], tokenizer, bench.config), bench)]
    tokens = _read(texts[: bench.sequences], tokenizer, bench.config)
    if bench.device.type == "cuda":
        on_step("model only, transformers' experts")
        results.append(_own_experts(model, tokens, bench))
    on_step("model only")
    results.append(_model_only(model, tokens, bench))
    for count in (bench.sequences, *growth):
        on_step(f"end to end, {count:,} sequences")
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
    """Our batches on transformers' own grouped experts: what experts.py is worth on a GPU."""
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
            batch, _ = make_batch(reference, windows)
            optimise_routing(model, routers, batch.to(bench.device), bench.config)
    tokens = int(reference.lengths.sum())
    return BuildMeasure(way, len(reference.lengths), tokens, watch.seconds, watch.peak_gb)


def _end_to_end(
    model: nn.Module, tokenizer: Any, texts: list[str], bench: BuildBench
) -> BuildMeasure:
    ends: dict[str, float] = {}

    def note(progress: BuildProgress) -> None:
        ends[progress.stage] = progress.seconds

    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        target = Path(scratch) / "memory"
        with _stopwatch(bench.device) as watch:
            memory = build_memory(
                model, tokenizer, texts, bench.config, folder=target, on_progress=note
            )
        size = memory.nbytes / 1e9
    stages = {
        "read": watch.seconds - ends["done"],
        "optimise and write": ends["seal"],
        "seal": ends["done"] - ends["seal"],
    }
    way = "end to end, memory on disk"
    measured = (len(memory), watch.seconds, watch.peak_gb, size, stages)
    return BuildMeasure(way, len(texts), *measured)


def _read(texts: list[str], tokenizer: Any, config: BuildConfig) -> ReferenceTokens:
    examples = (Example.of(text) for text in texts)
    return read_tokens(examples, tokenizer, config, config.max_length)


@dataclass
class _Watch:
    seconds: float = 0.0
    peak_gb: float = 0.0


@contextmanager
def _stopwatch(device: torch.device) -> Iterator[_Watch]:
    """Wall time between synchronised ends, and peak memory: the device's, or the process's."""
    watch = _Watch()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    start = time.perf_counter()
    yield watch
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        watch.peak_gb = torch.cuda.max_memory_allocated(device) / 1e9
    else:
        watch.peak_gb = _peak_resident() / 1e9
    watch.seconds = time.perf_counter() - start


def _peak_resident() -> int:
    """Bytes, mapped pages of the memory's own files included."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
