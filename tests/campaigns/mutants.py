"""Mutated and forged memories: each is refused by name, or loads, attaches and routes.

Every mutation is tried twice: as it is, and resealed as a forger would. Mutants run in forked
children, so that a crash or a hang is counted and does not end the campaign. A mutant passes if it
ends in a `KnnMoeError`, or runs on the model with finite logits; if it was not resealed and its
checksums were compared, it must also be what it was before. A file elsewhere is never read.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from campaigns.mutate import OUTSIDE, mutate, reseal
from campaigns.tally import Tally
from helpers.zoo import BUILD, VOCABULARY, family, make_texts
from knn_moe import HeadConfig, IndexConfig, RoutingConfig, RoutingMemory, attach, build_memory
from knn_moe.adapt.compress import compress
from knn_moe.bench.models import number_tokenizer
from knn_moe.config import LayerRouting
from knn_moe.errors import KnnMoeError
from knn_moe.inference.hidden_states import read_hidden_states
from knn_moe.memory.head_keys import HeadKeys

_SECONDS: Final = 20  # that a mutant may take before it counts as a hang
_MEMORY: Final = 8 << 30  # bytes of address space, so that an absurd size fails and swaps nothing
_WORKERS: Final = 2
_HEAD: Final = HeadConfig(k=6, weight=0.4, gamma_scale=0.5, keys="hidden")
_INDEXES: Final = {
    "fast": IndexConfig(kind="fast"),
    "fast-8-reranked": IndexConfig(kind="fast", bits=8, value_bits=4, rerank=True),
    "ivfpq": IndexConfig(kind="ivfpq", dims=16),
    "faiss-flat": IndexConfig(kind="faiss-flat"),
}
_PROMPTS: Final = (2, 24)  # tokens: few are searched one by one, many together
_CALIBRATION: Final = {
    "helps": True,
    "change": {"difference": -0.5, "low": -0.6, "high": -0.4, "p": 0.001},
    "examples": 6,
    "head": None,
}


class Outcome(NamedTuple):
    """What became of one mutant; no words: no harm."""

    number: int
    kind: str
    words: str


def run(count: int, seed: int, scratch: Path) -> Tally:
    """Try `count` mutants: half of them as they are, half of them resealed."""
    tally = Tally("mutants of memories")
    bases = make_bases(scratch / "bases")
    begin = [count * part // _WORKERS for part in range(_WORKERS + 1)]
    workers = [
        _Worker(range(*part), seed, bases, scratch / f"worker-{part[0]}")
        for part in pairwise(begin)
        if part[0] < part[1]
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.wait()
    for number, kind, words in sorted(one for worker in workers for one in worker.outcomes()):
        if words:
            tally.failed(kind, f"mutant {number}: {words}")
        else:
            tally.passed(kind)
    return tally


class _Worker:
    """One child after the other, each going on behind the mutant that ended the one before."""

    def __init__(self, numbers: range, seed: int, bases: Mapping[str, Path], scratch: Path) -> None:
        scratch.mkdir()
        self._left, self._seed, self._bases, self._scratch = numbers, seed, bases, scratch
        self._record = scratch / "outcomes"  # a line for each mutant that is made, and its outcome
        self._record.touch()
        self._child = 0

    def start(self) -> None:
        """Fork a child that tries the mutants that are left."""
        self._child = os.fork()
        if self._child:
            return
        try:
            _become_child()
            with self._record.open("a", encoding="utf8") as record:
                for number in self._left:
                    for line in _try(number, self._seed, self._bases, self._scratch):
                        record.write(ascii(line)[1:-1] + "\n")
                        record.flush()
        finally:
            os._exit(0)

    def wait(self) -> None:
        """Wait until all mutants were tried."""
        while True:
            _, status = os.waitpid(self._child, 0)
            if os.WIFSIGNALED(status):
                died = signal.Signals(os.WTERMSIG(status)).name
                with self._record.open("a", encoding="utf8") as record:
                    record.write(f"done it ended the process by {died}\n")
            outcomes = self.outcomes()
            if outcomes:
                self._left = self._left[self._left.index(outcomes[-1].number) + 1 :]
            if not self._left:
                return
            self.start()

    def outcomes(self) -> list[Outcome]:
        """Read what the children wrote."""
        found, number, kind = [], 0, ""
        for line in self._record.read_text(encoding="utf8").splitlines():
            word, _, rest = line.partition(" ")
            if word == "begin":
                text, _, kind = rest.partition(" ")
                number = int(text)
            else:
                found.append(Outcome(number, kind, rest))
        return found


def _become_child() -> None:
    """Let a hang or a large allocation end this process, and print nothing."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with Path(os.devnull).open("w", encoding="utf8") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _try(number: int, seed: int, bases: Mapping[str, Path], scratch: Path) -> Iterator[str]:
    """Make one mutant and use it: yield a line when it is made, and one when it is done."""
    draw = random.Random(f"{seed} {number // 2}")
    name = draw.choice(sorted(bases))
    area = scratch / "mutant"
    shutil.rmtree(area, ignore_errors=True)
    shutil.copytree(bases[name], area / "memory")
    signal.alarm(_SECONDS)
    kind = mutate(area / "memory", draw)
    forged, verify = number % 2 == 1, draw.random() < 0.7
    if forged:
        reseal(area / "memory")
    yield f"begin {number} {kind}{', resealed' if forged else ''}"
    words = ""
    try:
        memory = RoutingMemory.from_pretrained(area / "memory", verify=verify)
        if not forged and verify and _meaning(memory) != _meaning_of(bases[name]):
            words = "it loads unsealed with another meaning"
        elif kind == OUTSIDE:
            words = "it reads a file that is not in its folder"
        elif not _gives_finite_logits(memory):
            words = "its logits are not finite"
    except KnnMoeError:
        pass
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"[:300]
    signal.alarm(0)
    yield f"done {name}, verify={verify}: {words}" if words else "done "


@torch.no_grad()
def _gives_finite_logits(memory: RoutingMemory) -> bool:
    repr(memory)
    memory.reference_tokens()
    model = _model()
    with attach(model, memory) as routing:
        logits = [model(_prompt(length), use_cache=False).logits for length in _PROMPTS]
        routing.explain(_prompt(_PROMPTS[0]))
    return all(bool(part.isfinite().all()) for part in logits)


def _prompt(length: int) -> Tensor:
    return torch.arange(3, 3 + length)[None]


@cache
def _model() -> Any:
    torch.manual_seed(0)
    return family("olmoe").eval()


def make_bases(folder: Path) -> dict[str, Path]:
    """Write the memories that are mutated: full, calibrated with a head, compressed in each way."""
    tokenizer = number_tokenizer(VOCABULARY)
    plain = build_memory(_model(), tokenizer, make_texts(40), BUILD)
    keys = read_hidden_states(_model(), plain.reference_tokens(), BUILD.batch_tokens)
    widths = [LayerRouting(layer=n, gamma_scale=0.5, confidence_factor=0.9) for n in plain.layers]
    routing = RoutingConfig(k=4, per_layer=tuple(widths), head=_HEAD, spare_first_token=True)
    manifest = replace(plain.manifest, routing=routing, calibration=_CALIBRATION)
    head = HeadKeys.of(keys, plain.provenance)
    calibrated = replace(plain, manifest=manifest, head_keys=head, folder=None)
    by_router = replace(routing, head=replace(_HEAD, keys="router"), similarity="cosine")
    bases = {
        "plain": plain,
        "calibrated": calibrated,
        "router-head": replace(plain, manifest=replace(manifest, routing=by_router)),
    }
    for name, memory in bases.items():
        memory.save_pretrained(folder / name)
    for name, index in _INDEXES.items():
        compress(calibrated, index, folder / name)
    return {name: folder / name for name in (*bases, *_INDEXES)}


@cache
def _meaning_of(folder: Path) -> str:
    return _meaning(RoutingMemory.from_pretrained(folder))


def _meaning(memory: RoutingMemory) -> str:
    """Return all that a memory holds, as one text that can be compared."""
    tensors: dict[str, Any] = dict(vars(memory.provenance))
    for number, layer in memory.layers.items():
        parts = layer.tensors if hasattr(layer, "tensors") else vars(layer)
        tensors |= {f"{number} {name}": part for name, part in parts.items()}
    if memory.head_keys is not None:
        tensors |= {f"head {name}": part for name, part in memory.head_keys.tensors.items()}
    shown = {
        name: (str(part.dtype), part.reshape(-1).tolist()) if isinstance(part, Tensor) else part
        for name, part in sorted(tensors.items())
    }
    return f"{memory.manifest} {shown}"
