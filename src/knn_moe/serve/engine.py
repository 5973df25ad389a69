"""The engine: a model, its memories, and the jobs that wait and run.

Knows tokens and memories; nothing of text or HTTP. Its methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import torch

from knn_moe.config import RoutingConfig
from knn_moe.errors import (
    BusyError,
    ConfigError,
    KnnMoeError,
    RouterNotCalledError,
    ServeError,
    StoppedError,
    UnknownMemoryError,
    UnsupportedModelError,
)
from knn_moe.explain.explain import describe_runs
from knn_moe.explain.explanation import ExplainedToken
from knn_moe.inference.changing import ChangingMemories
from knn_moe.inference.stats import StatsByMemory
from knn_moe.inference.streaming import context_length
from knn_moe.memory.memory import RoutingMemory
from knn_moe.serve.backend import Backend
from knn_moe.serve.batches import Batches
from knn_moe.serve.jobs import Began, Ended, Event, Job
from knn_moe.serve.one_by_one import OneByOne
from knn_moe.serve.probe import STEPS, find_difference, quiet_transformers, read_alone
from knn_moe.serve.sampling import Sampling, Token

_CACHE_TOKENS: Final = 32_768  # of all answers together, unless one alone may need more
_PROBING: Final = Sampling(temperature=0.0, logprobs=0)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What runs at the same time, and what waits."""

    at_once: int = 32  # answers that are generated at the same time
    waiting: int = 256  # answers that wait beyond those
    cache_tokens: int | None = None  # that all answers together keep in the cache; None: enough
    batched: bool = True  # whether several may be generated at once

    def __post_init__(self) -> None:
        least = {"at_once": 1, "waiting": 0, "cache_tokens": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{name} must be at least {bound}, got {value}.")


class Engine:
    """Runs jobs on a model that has memories.

    Args:
        model: The model, with nothing attached.
        config: What runs at the same time.
        probes: Two short prompts of different lengths, to try the model with.

    Raises:
        AttachError: The model has a memory attached.
        UnsupportedModelError: The model cannot generate.
    """

    def __init__(self, model: Any, config: EngineConfig, probes: Sequence[Sequence[int]]) -> None:
        self.config = config
        self.why_one_by_one: str | None = None  # the reason, where answers come one at a time
        self.failure: str | None = None  # why nothing runs any more
        self.when_failed: Callable[[], None] | None = None
        self._model = model
        self._probes = probes
        self._lock = threading.RLock()
        self._fewer_jobs = threading.Condition(self._lock)
        self._changing = threading.Lock()  # held while a memory comes or goes
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._leaving: set[str] = set()  # memories that take no more jobs
        self._closed = False
        self.routing = ChangingMemories(model).installed()
        try:
            self._backend = self._choose_backend()
        except BaseException:
            self.routing.detach()
            raise

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its answer may have."""
        return self._backend.context

    @property
    def memories(self) -> list[str]:
        """The names of the memories that take jobs."""
        return [name for name in list(self.routing.memories) if name not in self._leaving]

    def counts(self) -> tuple[int, int]:
        """Return how many jobs run, and how many wait."""
        return len(self._running), len(self._waiting)

    def stats(self) -> StatsByMemory:
        """Return what each memory has done, by layer."""
        return self.routing.stats()

    # What runs the jobs

    def _choose_backend(self) -> Backend:
        self.why_one_by_one = "that was asked for"
        if self.config.batched:
            with quiet_transformers():
                self.why_one_by_one = self._try_batches()
            if self.why_one_by_one is None:
                return self._backend
        self._backend = OneByOne(self._model, self.routing, self)
        self._backend.start()
        try:
            self._probe(None)
        except ServeError as error:
            self._backend.stop(timeout=1)
            raise UnsupportedModelError(
                f"{type(self._model).__name__} cannot be served: {error}"
            ) from None
        return self._backend

    def _try_batches(self) -> str | None:
        """Begin to run jobs in batches, and return None; or why they cannot."""
        context = context_length(self._model) or _CACHE_TOKENS
        usual = max(min(self.config.at_once * context, _CACHE_TOKENS), context)
        cache_tokens = self.config.cache_tokens or usual
        try:
            with self.routing.using(None):
                alone = read_alone(self._model, self._probes)
            backend = Batches(self._model, self.routing, self, self.config.at_once, cache_tokens)
        except Exception as error:  # of transformers: each reason has its own type
            return _first_line(error)
        self._backend = backend
        backend.start()
        try:
            difference = find_difference(alone, self._probe(None), self._model.dtype)
        except ServeError as error:
            difference = str(error)
        if difference is not None:
            backend.stop(timeout=10)
            self.failure = None
        return difference

    def _probe(self, memory: str | None) -> list[list[Token]]:
        """Answer the probes, all at the same time.

        Raises:
            ServeError: They were not answered.
        """
        events: list[SimpleQueue[Event]] = [SimpleQueue() for _ in self._probes]
        jobs = [
            Job(prompt, memory, _PROBING, STEPS, frozenset(), mine.put)
            for prompt, mine in zip(self._probes, events, strict=True)
        ]
        with self._lock:
            self._waiting.extendleft(reversed(jobs))
            self._begin_some()
        answers = []
        for mine in events:
            tokens: list[Token] = []
            while not isinstance(event := mine.get(), Ended):
                if isinstance(event, Token):
                    tokens.append(event)
            if event.error is not None:
                raise ServeError(event.error)
            answers.append(tokens)
        return answers

    # Jobs

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take the jobs of a request, all or none.

        Raises:
            BusyError: Too many wait.
            StoppedError: The engine takes no more jobs.
            UnknownMemoryError: A memory is not there, or is being unloaded.
        """
        with self._lock:
            if self._closed or self.failure is not None:
                raise StoppedError("The server is stopping and takes no more requests.")
            for job in jobs:
                if job.memory is not None and job.memory not in self.memories:
                    raise UnknownMemoryError(f"The memory {job.memory!r} is not loaded.")
            room = self.config.waiting + self._backend.at_once
            if len(self._waiting) + len(self._running) + len(jobs) > room:
                raise BusyError(
                    f"{len(self._running)} answers are generated and {len(self._waiting)} wait. "
                    f"The server lets {self.config.waiting} wait. Try again later."
                )
            self._waiting.extend(jobs)
            self._begin_some()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End jobs without another event. Those that have ended are left alone."""
        with self._lock:
            for job in jobs:
                if job.ended:
                    continue
                job.ended = True
                if job in self._running:
                    self._running.discard(job)
                    self._backend.cancel(job)
                elif job in self._waiting:
                    self._waiting.remove(job)
            self._begin_some()
            self._fewer_jobs.notify_all()

    def _begin_some(self) -> None:
        while self._waiting and len(self._running) < self._backend.at_once:
            job = self._waiting.popleft()
            self._running.add(job)
            job.on_event(Began())
            self._backend.run(job)

    def on_token(self, job: Job, token: Token) -> None:
        """See Listener."""
        if not job.ended:
            job.on_event(token)

    def on_end(self, job: Job, error: str | None) -> None:
        """See Listener."""
        with self._lock:
            self._end(job, error)
            self._begin_some()

    def on_failure(self, error: str) -> None:
        """See Listener."""
        with self._lock:
            self.failure = error
            for job in [*self._running, *self._waiting]:
                self._end(job, error)
            self._waiting.clear()
        if self.when_failed is not None:
            self.when_failed()

    def _end(self, job: Job, error: str | None) -> None:
        if not job.ended:
            job.ended = True
            self._running.discard(job)
            job.on_event(Ended(error))
            self._fewer_jobs.notify_all()

    # Explanations

    def explain(
        self, memory: str, ids: Sequence[int], first: int, tokenizer: Any, *, cases: bool = True
    ) -> tuple[ExplainedToken, ...]:
        """Explain what a memory does to the tokens of a text from `first` on.

        Jobs pause while the model reads the text with the memory and alone.

        Args:
            memory: Its name.
            ids: The text's token ids.
            first: The first token to explain.
            tokenizer: The model's.
            cases: Whether recalled cases are told.

        Raises:
            StoppedError: The engine has stopped.
            UnknownMemoryError: The memory is not there, or is being unloaded.
        """
        with self._changing:
            if memory not in self.memories:
                raise UnknownMemoryError(f"The memory {memory!r} is not loaded.")
            describer = self.routing.describer(memory, tokenizer, cases=cases)
            self._check_running()
            with self._backend.whole_passes():
                runs = self.routing.trace(memory, torch.tensor(ids), first)
        return describe_runs(runs, list(ids), describer, first)

    # Memories

    def load(
        self, name: str, memory: RoutingMemory, config: RoutingConfig, *, force: bool = False
    ) -> None:
        """Add a memory while jobs run. They pause for a moment.

        Raises:
            ConfigError: There is a memory of this name.
            AttachError, MemoryMismatchError, MemoryFormatError: As in `attach`.
            StoppedError: The engine has stopped.
        """
        with self._changing:
            opened = self.routing.open(name, memory, config, force=force)
            self._leaving.add(name)  # until it was tried
            try:
                self._between_passes(lambda: self.routing.add(opened))
                self._probe(name)
                missed = [hook for hook in opened.hooks if not hook.was_called()]
                if missed:
                    raise RouterNotCalledError(
                        f"The model runs without calling {missed[0].router.name!r}, so the memory "
                        f"{name!r} has no effect there. A quantised or fused block may bypass the "
                        f"router: load the model without it."
                    )
                for hook in opened.hooks:
                    hook.counts.sums.zero_()  # trying it is not using it
            except BaseException:
                if name in self.routing.memories:
                    self._between_passes(lambda: self.routing.remove(name))
                raise
            finally:
                self._leaving.discard(name)

    def unload(self, name: str) -> None:
        """Take a memory off, after the last job that uses it. It takes no more from now on.

        Raises:
            UnknownMemoryError: It is not loaded.
        """
        with self._lock:
            if name not in self.memories:
                raise UnknownMemoryError(f"The memory {name!r} is not loaded.")
            self._leaving.add(name)
            self._fewer_jobs.wait_for(lambda: not self._uses(name))
        try:
            with self._changing:
                self._between_passes(lambda: self.routing.remove(name))
        finally:
            self._leaving.discard(name)

    def _uses(self, name: str) -> bool:
        return any(job.memory == name for job in (*self._running, *self._waiting))

    def _between_passes(self, change: Callable[[], None]) -> None:
        self._check_running()
        with self._backend.pause():
            change()

    def _check_running(self) -> None:
        if self._closed or self.failure is not None:
            raise StoppedError("The server has stopped.")

    # The end

    def close(self) -> None:
        """Take no more jobs. Those that were taken go on."""
        self._closed = True

    def stop(self, timeout: float | None = None) -> None:
        """End all jobs with an error, and take everything off the model."""
        self.close()
        with self._lock:
            for job in [*self._running, *self._waiting]:
                self._backend.cancel(job)
                self._end(job, "The server has stopped.")
            self._waiting.clear()
        self._backend.stop(timeout)
        with suppress(KnnMoeError):  # what bypasses a memory was told when it was loaded
            self.routing.detach()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
