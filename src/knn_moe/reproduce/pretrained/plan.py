"""What a study of pretrained models runs: which models, tasks, methods and reference sets.

Knows names and numbers; nothing of data, models or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from knn_moe.config import BuildConfig
from knn_moe.errors import ConfigError
from knn_moe.methods import METHODS
from knn_moe.support.registry import unknown_name

# The shorter test sets first, so that a study that is stopped has finished many of them.
QUESTIONS: Final = (
    "sciq", "openbookqa", "arc_easy", "arc_challenge", "commonsenseqa", "piqa", "boolq",
    "medmcqa", "hellaswag", "usmle", "mmlu",
)  # fmt: skip
TEXTS: Final = ("text_medical", "text_sql", "text_gsm8k", "text_mbpp", "text_hellaswag")
GENERATED: Final = ("gsm8k", "mbpp")

BASE: Final = "zero-shot"
RIVAL: Final = "knn-lm"  # what a memory of the same text can do without routing
TUNED: Final = ("sft-router", "sft")
BY_CHOICES: Final = "sft-router-choices"
LEARNING: Final = (
    RIVAL, "knn-paper", "knn-calibrated", "knn-calibrated+head", *TUNED, BY_CHOICES,
)  # fmt: skip
STUDIED: Final = (BASE, *LEARNING, "knn-right-answers", "5-shot", "c3po")
# Methods that are tried on other tasks than they learned from.
CARRIED: Final = ("knn-calibrated", "knn-calibrated+head", RIVAL, *TUNED, BY_CHOICES)

# Methods that are prepared together: the second one's memory is the first one's.
PREPARED_WITH: Final = {"knn-calibrated+head": "knn-calibrated"}

ACCURACY, TEXT_LOSS, GROWTH = "accuracy", "text", "growth"
TRANSFER, TOGETHER, GENERATION = "transfer", "together", "generation"
PARTS: Final = (ACCURACY, TEXT_LOSS, GROWTH, TRANSFER, TOGETHER, GENERATION)
ALL: Final = "all"  # the reference sets of all benchmarks together

_GROWING: Final = ("sciq", "arc_easy", "openbookqa", "commonsenseqa", "text_medical")
_SOURCES: Final = ("sciq", "arc_easy", "commonsenseqa", "hellaswag", "medmcqa")
LONG: Final = ("mmlu", "usmle")  # not asked of memories of other benchmarks: they take longest


@dataclass(frozen=True, kw_only=True)
class PretrainedPlan:
    """What is evaluated. The defaults are whole test sets, and everything but generation."""

    models: tuple[str, ...]
    parts: tuple[str, ...] = PARTS[:-1]
    tasks: tuple[str, ...] = (*QUESTIONS, *TEXTS, *GENERATED)
    methods: tuple[str, ...] = STUDIED
    reference: int = 500  # rows of each reference set of questions, or all if there are fewer
    texts: int = 200  # the same of plain text
    sizes: tuple[int, ...] = (30, 100, 300, 1000, 2000)  # of the part "growth"
    limit: int | None = None  # questions of a task, or windows of text
    seed: int = 0
    data: str | None = None  # as for `knn-moe eval --data`
    batch_tokens: int = 1 << 16
    build_tokens: int = BuildConfig.batch_tokens  # the same while a memory is built
    one_rate: bool = False  # search fine-tuning's learning rate on the first task only

    def __post_init__(self) -> None:
        for name, known in (("parts", PARTS), ("methods", tuple(METHODS))):
            for given in getattr(self, name):
                if given not in known:
                    raise ConfigError(unknown_name(name.removesuffix("s"), given, known))
        for name in ("models", "tasks", "parts"):
            if not getattr(self, name):
                raise ConfigError(f"A study needs at least one of its {name}.")
        numbers = self.reference, self.texts, self.batch_tokens, self.build_tokens
        if min(*numbers, *self.sizes) < 1:
            raise ConfigError(
                f"reference, texts, batch_tokens, build_tokens and sizes must be at least 1; got "
                f"{', '.join(map(str, numbers))} and {self.sizes}."
            )

    @property
    def growing(self) -> tuple[str, ...]:
        """The tasks of the part "growth"; all of them if the usual ones are not among them."""
        return tuple(task for task in _GROWING if task in self.tasks) or self.tasks

    @property
    def sources(self) -> tuple[str, ...]:
        """The tasks whose memories are tried on others."""
        return tuple(task for task in _SOURCES if task in self.tasks) or self.tasks


@dataclass(frozen=True)
class RunSpec:
    """One run: a method that learned from `size` rows of `source`, asked the questions of `task`.

    Both are None for a method that learns nothing.
    """

    model: str
    task: str
    method: str
    source: str | None = None
    size: int | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        if self.source is None:
            return self.method
        if self.source == self.task:
            return f"{self.method}-{self.size}"
        source = Path(self.source).name.partition(".")[0]  # a task may be given as a file
        return f"{self.method}-of-{source}-{self.size}"

    def __str__(self) -> str:
        return f"{self.model}, {self.task}, {self.name}"
