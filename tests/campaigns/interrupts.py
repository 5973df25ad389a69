"""Ctrl-C at random moments of attached models: SIGINT in the main thread of a forked process.

A timer sends the signal somewhere in the time that the operation takes. Afterwards no
torch-function mode is active, detaching works, no hook is left, the model alone gives its own
logits bit for bit, and a memory that is attached anew gives the right ones.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from campaigns.forked import run_forked
from campaigns.tally import Tally
from helpers.zoo import BUILD, VOCABULARY, family, make_texts
from knn_moe import HeadConfig, RoutingConfig, RoutingMemory, attach, attach_all, build_memory
from knn_moe.bench.models import number_tokenizer

_TRIES: Final = 50  # until the signal comes before the operation ends


def run(count: int, seed: int, scratch: Path) -> Tally:
    """Interrupt `count` operations."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tally = Tally("interrupts")
    program = Program()
    run_forked(tally, partial(_trial, program, seed), range(count))
    return tally


def _trial(program: Program, seed: int, number: int) -> tuple[str, str | None]:
    draw = random.Random(seed * 1_000_003 + number)
    kinds = sorted(KINDS)
    kind = kinds[number % len(kinds)]
    for _ in range(_TRIES):
        finish = Interrupt(draw, program.durations.get(kind))
        try:
            KINDS[kind](program, finish)
        except Exception as error:  # whatever it is, it is counted
            return kind, f"{type(error).__name__}: {error}"
        failure = program.find_harm(finish)
        if failure is not None or finish.interrupted:
            return kind, failure
        program.durations[kind] = finish.duration
    return kind, f"the operation was never interrupted in {_TRIES} tries"


class Interrupt:
    """Runs an operation and sends SIGINT somewhere in it. The first time it only measures it."""

    def __init__(self, draw: random.Random, duration: float | None) -> None:
        self.delay = None if duration is None else max(1e-6, draw.random() * duration)
        self.interrupted = False
        self.duration = 0.0
        self.left: Any = None  # the handle that is still attached
        self.problem: str | None = None  # what is wrong while it is

    def __call__(self, operation: Callable[[], object]) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        began = time.perf_counter()
        try:
            try:
                if self.delay is not None:
                    signal.setitimer(signal.ITIMER_REAL, self.delay)
                operation()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            self.interrupted = True
        self.duration = time.perf_counter() - began


class Program:
    """A model, its memory, and what both say when nobody interrupts them."""

    def __init__(self) -> None:
        self.model: Any = family("olmoe")
        tokenizer = number_tokenizer(VOCABULARY)
        self.memory: RoutingMemory = build_memory(self.model, tokenizer, make_texts(12), BUILD)
        self.ids = torch.randint(3, VOCABULARY, (2, 9))
        self.base = self.read()
        self.hooks = count_hooks(self.model)
        self.durations: dict[str, float] = {}
        with attach(self.model, self.memory):
            self.recalled = self.read()

    @torch.no_grad()
    def read(self) -> Tensor:
        logits: Tensor = self.model(self.ids, use_cache=False).logits
        return logits

    def generate(self) -> None:
        self.model.generate(self.ids, max_new_tokens=6, do_sample=False, pad_token_id=0)

    def find_harm(self, after: Interrupt) -> str | None:
        """Say what an interrupt has left behind; None: nothing."""
        if torch._C._len_torch_function_stack():
            return "a torch-function mode is active"
        with _Listener() as listener:
            torch.topk(torch.ones(3), 2)
        if not listener.heard:
            return "torch functions are disabled"
        if after.problem is not None:
            return after.problem
        try:
            if after.left is not None:
                after.left.detach()
            if count_hooks(self.model) != self.hooks:
                return f"{count_hooks(self.model) - self.hooks} hooks are on the detached model"
            if not torch.equal(self.read(), self.base):
                return "the model alone gives other logits than before"
            with attach(self.model, self.memory):
                recalled = self.read()
            if not torch.equal(recalled, self.recalled):
                return "a memory attached anew gives other logits than before"
        except Exception as error:  # whatever it is, it is counted
            return f"{type(error).__name__}: {error}"
        return None


class _Listener(TorchFunctionMode):
    heard = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard = True
        return func(*args, **(kwargs or {}))


def count_hooks(model: nn.Module) -> int:
    """Return how many forward hooks are on the model's modules."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def _in_forward(program: Program, interrupt: Interrupt) -> None:
    interrupt.left = attach(program.model, program.memory)
    interrupt(program.read)


def _in_generate(program: Program, interrupt: Interrupt) -> None:
    interrupt.left = attach(program.model, program.memory)
    interrupt(program.generate)


def _in_generate_with_head(program: Program, interrupt: Interrupt) -> None:
    config = RoutingConfig(head=HeadConfig(k=4, weight=0.3))
    interrupt.left = attach(program.model, program.memory, config)
    interrupt(program.generate)


def _in_attach(program: Program, interrupt: Interrupt) -> None:
    handles: list[Any] = []
    interrupt(lambda: handles.append(attach(program.model, program.memory)))
    interrupt.left = handles[0] if handles else None


def _in_detach(program: Program, interrupt: Interrupt) -> None:
    interrupt.left = attach(program.model, program.memory)
    program.read()
    interrupt(interrupt.left.detach)


def _in_block(program: Program, interrupt: Interrupt) -> None:
    def block() -> None:
        with attach(program.model, program.memory):
            program.read()

    interrupt(block)


def _in_using(program: Program, interrupt: Interrupt) -> None:
    interrupt.left = routing = attach_all(program.model, {"one": program.memory})

    def block() -> None:
        with routing.using("one"):
            program.read()

    interrupt(block)
    if not torch.equal(program.read(), program.base):
        interrupt.problem = "a memory is used outside using()"


def _in_explain(program: Program, interrupt: Interrupt) -> None:
    interrupt.left = routing = attach(program.model, program.memory)
    program.read()
    before = routing.stats()
    interrupt(lambda: routing.explain(program.ids))
    if routing.stats() != before:
        interrupt.problem = "an interrupted explain() is in the statistics"
    program.read()
    if {layer.calls for layer in routing.stats().values()} != {2}:
        interrupt.problem = "after an interrupted explain() passes are not counted"


KINDS: Final[dict[str, Callable[[Program, Interrupt], None]]] = {
    "attach": _in_attach,
    "detach": _in_detach,
    "explain": _in_explain,
    "forward": _in_forward,
    "generate": _in_generate,
    "generate with head": _in_generate_with_head,
    "using": _in_using,
    "with attach": _in_block,
}
