"""What a method prepares from: a model, and the reference set of the task it will answer.

The same rows for every method that is compared. What several methods need, such as a memory, is
made once, and its seconds count for each of them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch import nn

from knn_moe.config import BuildConfig
from knn_moe.index import IndexConfig
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.examples import Example
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.reference_set import reference_examples, reference_rows
from knn_moe.tasks.task import TEXT, Row

OnProgress: TypeAlias = Callable[[int, int, str], None]  # done, of how many, what is being done
T = TypeVar("T")


def _silent(done: int, total: int, what: str) -> None:
    pass


@dataclass
class Setting:
    """A model before a task, and what may be learned from its reference set."""

    model: nn.Module
    tokenizer: Any
    data: TaskData
    scoring: str
    limit: int | None = None  # reference rows, drawn at random
    seed: int = 0  # of that draw, and of whatever a method draws
    length: int = 256  # tokens of a window of text
    batch_size: int = 16
    preset: str = "strong"  # of a memory that is built
    memory: RoutingMemory | None = None  # one that is there already
    index: IndexConfig | None = None  # to search it by. None: its own
    folder: Path | None = None  # where what is prepared is kept; None: nowhere
    on_progress: OnProgress = _silent
    borrowed: float = field(default=0.0, repr=False)  # seconds of what was made for another method
    _made: dict[str, tuple[Any, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def rows(self) -> list[Row]:
        """The reference rows, those of `limit`."""
        return reference_rows(self.data, self.limit, self.seed)

    @cached_property
    def examples(self) -> list[Example]:
        """The same as examples, in the form in which the task will be asked."""
        return reference_examples(self.tokenizer, self.data, self.scoring, self.rows)

    def facts(self) -> dict[str, Any]:
        """What tells preparations apart, as JSON takes it; known before anything is prepared."""
        return {
            "reference": None if self.limit is None else min(self.limit, len(self.data.reference)),
            "rows": len(self.data.reference),
            "seed": self.seed,
            "length": self.length,
            "preset": self.preset,
            "memory": None if self.memory is None else _told_apart(self.memory),
            "index": None if self.index is None else asdict(self.index),
        }

    def build_config(self, **changes: Any) -> BuildConfig:
        """How a memory of the reference is built: text in windows as it will be asked."""
        if self.scoring == TEXT:
            changes = {"max_length": self.length, **changes}
        return BuildConfig(**{"preset": self.preset, **changes})

    def made(self, what: str, make: Callable[[], T]) -> T:
        """What `make` makes: once, however many methods ask for it."""
        if what in self._made:
            value, seconds = self._made[what]
            self.borrowed += seconds
            return value  # type: ignore[no-any-return]
        started, before = time.perf_counter(), self.borrowed
        made = make()
        self._made[what] = made, time.perf_counter() - started + self.borrowed - before
        return made


def _told_apart(memory: RoutingMemory) -> str:
    """A hash of what a memory was built of, and how."""
    tokens = memory.provenance.stream.numpy().tobytes()
    return hashlib.sha256(tokens + repr(memory.build).encode()).hexdigest()[:16]
