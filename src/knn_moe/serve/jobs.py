"""A job: one answer that the engine generates.

A request is one job, or several where it asks for several answers. Knows token ids; nothing of
text or HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from knn_moe.serve.sampling import Drawer, Sampling, Token


@dataclass(frozen=True)
class Began:
    """A job left the queue."""


@dataclass(frozen=True)
class Ended:
    """A job has ended, by a token or its length; or with an error."""

    error: str | None = None


Event: TypeAlias = Began | Token | Ended


@dataclass(eq=False)
class Job:
    """One answer.

    Args:
        prompt: Token ids.
        memory: The name of the memory that answers; None: the model alone.
        sampling: How tokens are drawn.
        max_tokens: The most that are generated.
        ends: The tokens that end the answer.
        on_event: Called with each event, in the engine's threads, and never after `Ended`.
    """

    prompt: Sequence[int]
    memory: str | None
    sampling: Sampling
    max_tokens: int
    ends: frozenset[int]
    on_event: Callable[[Event], None]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.drawer = Drawer(self.sampling)
        self.ended = False
        self.began = False
        self.created = time.monotonic()
