"""What a method is prepared on: a model, and the reference set of the task it will answer.

Every compared method sees the same reference rows. What several methods need, such as a memory, is
made once; the seconds this took count for each of them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from knn_moe.config import BuildConfig
from knn_moe.index import IndexConfig
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.examples import Example
from knn_moe.support.progress import OnProgress, ignore_progress
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.reference_set import reference_examples, reference_rows
from knn_moe.tasks.task import TEXT, Row

T = TypeVar("T")


@dataclass
class TaskContext:
    """A model, a task, and how methods learn from the task's reference set."""

    model: nn.Module
    tokenizer: Any
    data: TaskData
    scoring: str
    limit: int | None = None  # number of reference rows, drawn at random; None: all
    seed: int = 0  # for that draw, and for whatever a method draws
    length: int = 256  # tokens per window of text
    batch_size: int = 16
    build_tokens: int = BuildConfig.batch_tokens  # read at a time while a memory is built
    preset: str | None = None  # for memories that are built here; None: calibrate if possible
    memory: RoutingMemory | None = None  # use this memory instead of building one
    index: IndexConfig | None = None  # how memories are searched; None: as they say themselves
    folder: Path | None = None  # where memories are saved and found again; None: nowhere
    on_progress: OnProgress = ignore_progress
    notes: list[str] = field(default_factory=list)  # sentences that the user should read
    shared_seconds: float = field(default=0.0, repr=False)  # spent earlier, for another method
    _cache: dict[str, tuple[Any, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def rows(self) -> list[Row]:
        """The reference rows, at most `limit`."""
        return reference_rows(self.data, self.limit, self.seed)

    @cached_property
    def examples(self) -> list[Example]:
        """The reference rows as examples, in the form in which the task's questions are asked."""
        return reference_examples(self.tokenizer, self.data, self.scoring, self.rows)

    def facts(self) -> dict[str, Any]:
        """Return what tells preparations apart, for JSON; known before anything is prepared."""
        return {
            "reference": None if self.limit is None else min(self.limit, len(self.data.reference)),
            "rows": len(self.data.reference),
            "seed": self.seed,
            "length": self.length,
            "preset": self.preset,
            "memory": None if self.memory is None else _memory_hash(self.memory),
            "index": None if self.index is None else asdict(self.index),
        }

    def build_config(self, **changes: Any) -> BuildConfig:
        """Return how a memory is built; text is cut into windows of the length that is asked."""
        if self.scoring == TEXT:
            changes = {"max_length": self.length, **changes}
        changes = {"batch_tokens": self.build_tokens, **changes}
        return BuildConfig(**{"preset": self.preset or BuildConfig.preset, **changes})

    def cached(self, key: str, make: Callable[[], T]) -> T:
        """Return what `make` returned when `key` was first asked for."""
        if key in self._cache:
            value, seconds = self._cache[key]
            self.shared_seconds += seconds
            return value  # type: ignore[no-any-return]
        started, shared = time.perf_counter(), self.shared_seconds
        value = make()
        self._cache[key] = value, time.perf_counter() - started + self.shared_seconds - shared
        return value


def _memory_hash(memory: RoutingMemory) -> str:
    """Hash the tokens a memory was built from and its build config."""
    tokens = memory.provenance.stream.numpy().tobytes()
    return hashlib.sha256(tokens + repr(memory.build).encode()).hexdigest()[:16]
