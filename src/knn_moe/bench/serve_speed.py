"""`knn-moe serve` under load: the model alone beside one memory and many, full and distilled.

Each case has a server in a process of its own, and all of them run; clients ask one after the
other, in rounds, so that what else the machine does falls on all.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from knn_moe.bench.clients import Answered, Load, ask_many
from knn_moe.bench.keys import record_memory
from knn_moe.bench.models import SHAPES, number_tokenizer, random_model
from knn_moe.bench.uses import distilled_memory
from knn_moe.config import RoutingConfig
from knn_moe.errors import ConfigError, ServeError
from knn_moe.memory.memory import RoutingMemory
from knn_moe.routers.load import load_model
from knn_moe.support.progress import OnProgress, Progress, ignore_progress

BASE: Final = "base"
_RUN: Final = "from knn_moe.cli.main import main; main()"
_SAMPLES: Final = 20  # of a server's memory, in the time of a case


@dataclass(frozen=True)
class Case:
    """What a server has: the model alone, or some memories of one kind."""

    kind: str  # "base", "full" or "distilled"
    memories: int = 0

    @property
    def name(self) -> str:
        return BASE if not self.memories else f"{self.memories} {self.kind}"


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """What is measured.

    Args:
        model: A model, as `knn-moe serve` takes it; None: random weights.
        shape: The shape of a model with random weights.
        cases: What servers have; the first is the one that the others are compared with.
        seconds: In which clients ask, for each case.
        rounds: In which the cases take turns.
        load: What clients ask for.
        at_once: Answers that a server generates at the same time.
        keys: Cases of a memory in each layer.
        k: Neighbours that full memories recall.
        prototypes: Of distilled memories, in each layer.
    """

    model: str | None
    shape: str = "olmoe-80m"
    cases: tuple[Case, ...]
    seconds: float = 120.0
    rounds: int = 2
    load: Load = field(default_factory=Load)
    at_once: int = 32
    keys: int = 20_000
    k: int = 1
    prototypes: int = 1024

    def __post_init__(self) -> None:
        if self.prototypes > self.keys:
            raise ConfigError(
                f"A memory of {self.keys:,} keys has no {self.prototypes:,} prototypes. Ask for "
                f"fewer, or for more keys."
            )


@dataclass(frozen=True)
class ServeMeasure:
    """What clients of one server got."""

    case: str
    got: Answered
    base_tokens_per_second: float
    megabytes: list[float]  # of the server's process, from the beginning to the end

    @property
    def tokens_per_second(self) -> float:
        return self.got.tokens / self.got.seconds

    @property
    def times_base(self) -> float:
        return self.tokens_per_second / max(self.base_tokens_per_second, 1e-9)

    def first_token(self, share: float) -> float:
        """Return the time to the first token that this share of answers kept."""
        return percentile([answer.first for answer in self.got.answers], share)

    def latency(self, share: float) -> float:
        """Return the time of a whole answer that this share of them kept."""
        return percentile([answer.whole for answer in self.got.answers], share)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON takes them."""
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        return {
            "case": self.case,
            "tokens_per_second": self.tokens_per_second,
            "times_base": self.times_base,
            "first_token_seconds": {name: self.first_token(at) for name, at in shares.items()},
            "latency_seconds": {name: self.latency(at) for name, at in shares.items()},
            "answers": len(self.got.answers),
            "errors": self.got.errors,
            "seconds": self.got.seconds,
            "megabytes": self.megabytes,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of all values do not exceed; 0 if there is none."""
    ranked = sorted(values)
    return ranked[max(math.ceil(len(ranked) * share) - 1, 0)] if ranked else 0.0


def measure_serving(
    bench: ServeBench, on_progress: OnProgress = ignore_progress
) -> list[ServeMeasure]:
    """Start a server for each case, and let clients ask them in turns.

    Raises:
        ServeError: A server did not start.
    """
    with TemporaryDirectory(prefix="knn-moe-bench-") as scratch, ExitStack() as stack:
        model, vocabulary, folders = _prepare(bench, Path(scratch), on_progress)
        servers = []
        for done, case in enumerate(bench.cases):
            on_progress(Progress("starting servers", done, len(bench.cases)))
            names = [f"{case.kind}-{number}" for number in range(case.memories)]
            memories = [f"{name}={folders[case.kind]}" for name in names]
            port, process = stack.enter_context(_serve(model, memories, bench.at_once))
            servers.append(_Server(case, port, process.pid, names or [BASE]))
        for server in servers:  # what is done once is done now
            server.ask(replace(bench.load, clients=len(server.names)), vocabulary, 0.01)
        for turn in range(bench.rounds):
            for done, server in enumerate(servers):
                stage = f"round {turn + 1} of {bench.rounds}, {server.case.name}"
                on_progress(Progress(stage, done, len(servers)))
                server.measure(bench.load, vocabulary, bench.seconds / bench.rounds)
    base = servers[0].got.tokens / servers[0].got.seconds
    return [ServeMeasure(one.case.name, one.got, base, one.megabytes) for one in servers]


def _prepare(
    bench: ServeBench, scratch: Path, on_progress: OnProgress
) -> tuple[str, int, dict[str, Path]]:
    """Return the model for servers, its vocabulary, and the folders of memories by their kind."""
    if bench.model is None:
        network: Any = random_model(bench.shape, torch.device("cpu"), torch.float32)
        vocabulary = SHAPES.find(bench.shape).vocabulary
        name = str(scratch / bench.shape)
        network.save_pretrained(name)
        number_tokenizer(vocabulary).save_pretrained(name)
    else:
        name = bench.model
        network, _ = load_model(name, dtype="float32")
        vocabulary = network.config.vocab_size
    folders: dict[str, Path] = {}
    if any(case.memories for case in bench.cases):
        full = record_memory(network, bench.keys, on_progress)
        for kind, memory in _kinds(full, bench).items():
            folders[kind] = scratch / kind
            memory.save_pretrained(folders[kind])
    return name, vocabulary, folders


def _kinds(full: RoutingMemory, bench: ServeBench) -> dict[str, RoutingMemory]:
    manifest = replace(full.manifest, routing=RoutingConfig(k=bench.k))
    return {
        "full": replace(full, manifest=manifest),
        "distilled": distilled_memory(full, bench.prototypes),
    }


class _Server:
    """A server that runs, and what its clients got so far."""

    def __init__(self, case: Case, port: int, process: int, names: Sequence[str]) -> None:
        self.case = case
        self.names = names
        self.got = Answered()
        self.megabytes: list[float] = []
        self._port = port
        self._process = process

    def ask(self, load: Load, vocabulary: int, seconds: float) -> Answered:
        return ask_many(self._port, self.names, vocabulary, load, seconds)

    def measure(self, load: Load, vocabulary: int, seconds: float) -> None:
        """Let clients ask for some time, and note how much memory the server takes."""
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(done, seconds / _SAMPLES))
        watch.start()
        try:
            self.got.add(self.ask(load, vocabulary, seconds))
        finally:
            done.set()
            watch.join()

    def _watch(self, done: threading.Event, every: float) -> None:
        while True:
            held = resident_megabytes(self._process)
            self.megabytes += [] if held is None else [held]
            if done.wait(every):
                return


def resident_megabytes(process: int) -> float | None:
    """Return the memory that a process holds, where Linux tells it."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="utf8").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def _serve(
    model: str, memories: Sequence[str], at_once: int
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start a server on a free port, and end it in the end."""
    arguments = ["serve", model, "--name", BASE, "--port", "0", "--dtype", "float32"]
    arguments += ["--at-once", str(at_once), "--max-waiting", "100000"]
    for memory in memories:
        arguments += ["--memory", memory]
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield _port_of(process), process
        finally:
            process.terminate()


def _port_of(process: subprocess.Popen[str]) -> int:
    """Wait until a server says where it listens."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line.strip())
        _, found, address = line.partition("in a browser: ")
        if found:
            return int(address.strip().strip("/").rpartition(":")[2])
    raise ServeError(f"A server did not start: {' '.join(said[-3:]) or 'it said nothing'}")


def settings_of(bench: ServeBench) -> dict[str, Any]:
    """Return the settings as JSON takes them."""
    return asdict(bench) | {"cases": [case.name for case in bench.cases]}
