"""One request from its tokens to its pieces of text: submitted, followed, timed and cancelled.

Knows the engine and asyncio; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from knn_moe.errors import BusyError, StoppedError, UnknownMemoryError
from knn_moe.serve.engine import Engine
from knn_moe.serve.jobs import Began, Ended, Event, Job
from knn_moe.serve.metrics import Metrics
from knn_moe.serve.refused import RefusedError
from knn_moe.serve.requests import Asked
from knn_moe.serve.sampling import Sampling
from knn_moe.serve.text import AnswerText, Piece


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may take."""

    request_bytes: int = 1 << 20
    tokens: int | None = None  # generated in one answer; None: as the context has room for
    seconds: float = 300.0
    explained: int = 1024  # tokens of a prompt and its answer that are explained; 0: none are


class Mailbox:
    """Events of an engine's threads, for one task of an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._events: deque[tuple[int, Event]] = deque()
        self._woken = False

    def put(self, index: int, event: Event) -> None:
        """Take an event, in any thread."""
        self._events.append((index, event))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(self._came.set)

    async def take(self) -> list[tuple[int, Event]]:
        """Wait for events, and return those that have come."""
        await self._came.wait()
        self._came.clear()
        self._woken = False
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken


class Answering:
    """The answers to one request.

    Args:
        asked: The request.
        memory: The memory that answers; None: the model alone.
        prompts: The token ids of its prompts.
        max_tokens: The most tokens of an answer, for each prompt.
        ends: The tokens that end an answer.
        tokenizer: The model's.
        metrics: Counts it.
        seconds: The time it may take.
    """

    def __init__(
        self,
        asked: Asked,
        memory: str | None,
        prompts: list[tuple[list[int], int]],
        ends: frozenset[int],
        tokenizer: Any,
        metrics: Metrics,
        seconds: float,
    ) -> None:
        self.asked = asked
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.prompt_tokens = sum(len(ids) for ids, _ in prompts)
        self._mailbox = Mailbox()
        self._metrics = metrics
        self._seconds = seconds
        self._started = time.monotonic()
        self.texts = [AnswerText(tokenizer, asked.stops, ends) for _ in range(asked.choices)]
        self.jobs = [
            Job(
                prompt=ids,
                memory=memory,
                sampling=_sampling(asked.sampling, turn),
                max_tokens=most,
                ends=ends,
                on_event=partial(self._mailbox.put, place * asked.n + turn),
            )
            for place, (ids, most) in enumerate(prompts)
            for turn in range(asked.n)
        ]

    @property
    def completion_tokens(self) -> int:
        """How many tokens were generated so far."""
        return sum(text.count for text in self.texts)

    def submit(self, engine: Engine) -> None:
        """Let the engine begin.

        Raises:
            RefusedError: It takes no more.
        """
        try:
            engine.submit(self.jobs)
        except BusyError as error:
            raise RefusedError(str(error), status=429, code="too_many_requests") from None
        except StoppedError as error:
            raise RefusedError(str(error), status=503, code="stopping") from None
        except UnknownMemoryError as error:
            raise RefusedError(str(error), status=404, code="model_not_found") from None

    async def pieces(
        self, cancel: Callable[[list[Job]], None]
    ) -> AsyncGenerator[tuple[int, Piece]]:
        """Yield each answer's number and next piece, until all have ended.

        Args:
            cancel: Ends jobs that are no longer wanted.

        Raises:
            RefusedError: It failed, or took too long.
        """
        reason, ends = "abandoned", self._started + self._seconds
        try:
            while not all(text.ended for text in self.texts):
                left = ends - time.monotonic()
                for index, event in await asyncio.wait_for(self._mailbox.take(), max(left, 0.0)):
                    piece = self._follow(index, event)
                    if piece is not None:
                        yield index, piece
                    if piece is not None and piece.reason is not None:
                        cancel([self.jobs[index]])
            reason = "answered"
        except TimeoutError:
            reason = "too late"
            raise RefusedError(
                f"The answer took longer than {self._seconds:g} seconds.",
                status=504,
                code="timeout",
            ) from None
        except RefusedError:
            reason = "failed"
            raise
        finally:
            cancel(self.jobs)
            self._metrics.on_end(self, reason, time.monotonic() - self._started)

    def _follow(self, index: int, event: Event) -> Piece | None:
        text = self.texts[index]
        if text.ended:
            return None
        if isinstance(event, Began):
            self._metrics.on_begin(self, time.monotonic() - self._started)
            return None
        if not isinstance(event, Ended):
            if self.completion_tokens == 0:
                self._metrics.on_first_token(self, time.monotonic() - self._started)
            return text.push(event)
        if event.error is not None:
            raise RefusedError(event.error, status=500, code="engine_error")
        return text.finish()


def _sampling(sampling: Sampling, turn: int) -> Sampling:
    """Return the sampling of one of several answers: each has a seed of its own."""
    if sampling.seed is None:
        return sampling
    seed = (sampling.seed + turn) % (1 << 63)
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=seed,
        logprobs=sampling.logprobs,
    )
