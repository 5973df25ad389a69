"""Threads that share an attached model: each answer is the one that a single thread gets.

Threads choose different memories, attach and detach at the same time, and count. They switch every
ten microseconds. Each trial runs in a forked process.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from campaigns.forked import run_forked
from campaigns.interrupts import count_hooks
from campaigns.tally import Tally
from helpers.zoo import BUILD, VOCABULARY, family, make_texts
from knn_moe import HeadConfig, RoutingConfig, RoutingMemory, attach, attach_all, build_memory
from knn_moe.bench.models import number_tokenizer
from knn_moe.errors import AttachError

_THREADS: Final = 4
_CALLS: Final = 5  # of each thread
_HEAD: Final = RoutingConfig(head=HeadConfig(k=4, weight=0.3))


def run(count: int, seed: int, scratch: Path) -> Tally:
    """Run `count` programs of several threads."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tally = Tally("threads")
    run_forked(tally, partial(_trial, Program(), seed), range(count))
    return tally


def _trial(program: Program, seed: int, number: int) -> tuple[str, str | None]:
    # torch makes its thread pool anew after a fork, which two threads must not do at once.
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    kinds = sorted(KINDS)
    kind = kinds[number % len(kinds)]
    try:
        failure = KINDS[kind](program, random.Random(seed * 1_000_003 + number))
    except Exception as error:  # whatever it is, it is counted
        return kind, f"{type(error).__name__}: {error}"
    if failure is None and count_hooks(program.model) != program.hooks:
        failure = "hooks are on the detached model"
    if failure is None and not torch.equal(program.read(), program.base):
        failure = "the model alone gives other logits than before"
    return kind, failure


class Program:
    """A model, four memories, and what they say to a single thread."""

    def __init__(self) -> None:
        self.model: Any = family("olmoe")
        tokenizer = number_tokenizer(VOCABULARY)
        self.memories: dict[str, RoutingMemory] = {
            name: build_memory(self.model, tokenizer, make_texts(6, seed=seed), BUILD)
            for seed, name in enumerate("abcd")
        }
        self.ids = torch.randint(3, VOCABULARY, (3, 9))
        self.hooks = count_hooks(self.model)
        self.base = self.read()
        self.expected: dict[str | None, Tensor] = {None: self.base}
        self.with_head: dict[str, Tensor] = {}
        self.continued: dict[str, Tensor] = {}
        for name, memory in self.memories.items():
            with attach(self.model, memory):
                self.expected[name], self.continued[name] = self.read(), self.generate()
            with attach(self.model, memory, _HEAD):
                self.with_head[name] = self.read()

    @torch.no_grad()
    def read(self) -> Tensor:
        logits: Tensor = self.model(self.ids, use_cache=False).logits
        return logits

    def generate(self) -> Tensor:
        tokens: Tensor = self.model.generate(
            self.ids, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        return tokens


def _at_once(*works: Callable[[], str | None]) -> str | None:
    """Run each of `works` in a thread, and return the first failure."""
    start = threading.Barrier(len(works))
    failures: list[str] = []

    def do(work: Callable[[], str | None]) -> None:
        start.wait()
        try:
            failure = work()
        except Exception as error:  # whatever it is, it is counted
            failure = f"{type(error).__name__}: {error}"
        if failure is None and torch._C._len_torch_function_stack():
            failure = "a torch-function mode is active in a thread"
        if failure is not None:
            failures.append(failure)

    threads = [threading.Thread(target=do, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures[0] if failures else None


def _tenants(
    program: Program, answer: Callable[[], Tensor], expected: Any, configs: Any = None
) -> str | None:
    with attach_all(program.model, program.memories, configs) as routing:

        def work(name: str) -> str | None:
            for _ in range(_CALLS):
                with routing.using(name):
                    found = answer()
                if not torch.equal(found, expected[name]):
                    others = [one for one in expected if torch.equal(found, expected[one])]
                    return f"{name!r} got the answer of {others or 'nobody'}"
            return None

        return _at_once(*(partial(work, name) for name in program.memories))


def _choose(program: Program, draw: random.Random) -> str | None:
    return _tenants(program, program.read, program.expected)


def _choose_and_generate(program: Program, draw: random.Random) -> str | None:
    return _tenants(program, program.generate, program.continued)


def _choose_with_heads(program: Program, draw: random.Random) -> str | None:
    configs = dict.fromkeys(program.memories, _HEAD)
    return _tenants(program, program.read, program.with_head, configs)


def _choose_rows(program: Program, draw: random.Random) -> str | None:
    names: list[str | None] = [None, *program.memories]
    plans = [[draw.choices(names, k=3) for _ in range(_CALLS)] for _ in range(_THREADS)]
    with attach_all(program.model, program.memories) as routing:

        def read(choice: list[str | None]) -> Tensor:
            with routing.using(choice):
                return program.read()

        alone = [[read(choice) for choice in plan] for plan in plans]

        def work(plan: list[list[str | None]], expected: list[Tensor]) -> str | None:
            for choice, wanted in zip(plan, expected, strict=True):
                if not torch.equal(read(choice), wanted):
                    return f"{choice} got other rows"
            return None

        return _at_once(*(partial(work, *each) for each in zip(plans, alone, strict=True)))


def _choose_nothing(program: Program, draw: random.Random) -> str | None:
    """A thread that chooses nothing beside one that does: refused, or the model alone."""
    with attach_all(program.model, program.memories) as routing:

        def chooses() -> str | None:
            for _ in range(_CALLS):
                with routing.using("a"):
                    program.read()
            return None

        def does_not() -> str | None:
            for _ in range(_CALLS):
                try:
                    found = program.read()
                except AttachError:
                    continue
                if not torch.equal(found, program.base):
                    return "a thread that chose nothing got a memory"
            return None

        return _at_once(chooses, does_not)


def _detach(program: Program, draw: random.Random) -> str | None:
    routing = attach(program.model, program.memories["a"])
    allowed = program.base, program.expected["a"]
    calls = draw.randrange(_CALLS)

    def reads() -> str | None:
        for _ in range(_CALLS):
            found = program.read()
            if not any(torch.equal(found, one) for one in allowed):
                return "a pass began with the memory and ended without it"
        return None

    def detaches() -> None:
        for _ in range(calls):
            program.read()
        routing.detach()

    return _at_once(detaches, *[reads] * (_THREADS - 1))


def _attach(program: Program, draw: random.Random) -> str | None:
    handles: list[Any] = []

    def attaches(name: str) -> None:
        try:
            handles.append(attach(program.model, program.memories[name]))
        except AttachError:
            return

    failure = _at_once(*(partial(attaches, name) for name in program.memories))
    for handle in handles:
        handle.detach()
    if failure is None and len(handles) != 1:
        failure = f"{len(handles)} threads have attached a memory"
    return failure


def _count(program: Program, draw: random.Random) -> str | None:
    with attach(program.model, program.memories["a"]) as routing:

        def reads() -> None:
            for _ in range(_CALLS):
                program.read()

        failure = _at_once(*[reads] * _THREADS)
        counted = {(layer.calls, layer.tokens) for layer in routing.stats().values()}
    calls = _THREADS * _CALLS
    if failure is None and counted != {(calls, calls * program.ids.numel())}:
        failure = f"{calls} calls of {program.ids.numel()} tokens were counted as {counted}"
    return failure


def _explain(program: Program, draw: random.Random) -> str | None:
    """Each thread's explain() shows what that thread has read, and counts nothing."""
    with attach(program.model, program.memories["a"]) as routing:

        def work(row: int) -> str | None:
            ids = program.ids[row : row + 1, : 5 + row]
            for _ in range(2):
                with torch.no_grad():
                    program.model(ids, use_cache=False)
                shown = [token.id for token in routing.explain().tokens]
                if shown != ids[0].tolist():
                    return "a thread's explain() shows what another thread has read"
            return None

        failure = _at_once(*(partial(work, row) for row in range(3)))
        counted = {layer.calls for layer in routing.stats().values()}
    return failure or (None if counted == {6} else f"6 calls were counted as {counted}")


KINDS: Final[dict[str, Callable[[Program, random.Random], str | None]]] = {
    "attach at once": _attach,
    "choose": _choose,
    "choose and generate": _choose_and_generate,
    "choose nothing": _choose_nothing,
    "choose rows": _choose_rows,
    "choose with heads": _choose_with_heads,
    "detach during a pass": _detach,
    "explain": _explain,
    "stats": _count,
}
