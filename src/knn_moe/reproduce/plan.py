"""What is asked of whom: the settings all tables of a study share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from knn_moe.errors import ConfigError
from knn_moe.support.embedded_models import EMBEDDED_MODELS

_USUAL: Any = None
_SWEPT: Final = ("medmcqa", "text_medical")
PAPER_TASKS: Final = ("gpqa", "mmlu", "supergpqa", "usmle", "medmcqa", "mbpp")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The defaults are for small models on a CPU; the paper's own is `Plan.of_the_paper`."""

    models: tuple[str, ...] = EMBEDDED_MODELS
    tasks: tuple[str, ...] = ("mmlu", "medmcqa", "text_medical")
    # Tasks in which one setting is varied, and of fine-tuning from several seeds. Left out: two
    # of them, or all if neither is there.
    swept: tuple[str, ...] = _USUAL
    seeded: tuple[str, ...] = _USUAL
    generate: bool = False  # answers in words, as in the paper; else by likelihood
    data: str | None = None
    limit: int | None = 64  # questions of a task, or windows of text
    reference: int | None = 40  # rows of its reference set
    sizes: tuple[float, ...] = (0.25, 0.5, 1.0)  # of the reference set, where that is varied
    steps_share: float = 0.25  # of it, where the steps are: each number of them is a memory
    preset: str = "strong"  # of kNN-MoE
    presets: tuple[str, ...] = ("paper", "strong")  # in which one setting is varied
    seed: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("models", "tasks"):
            if not getattr(self, name):
                raise ConfigError(f"A study needs at least one of its {name}.")
        if not all(0 < size <= 1 for size in (*self.sizes, self.steps_share)):
            raise ConfigError(f"sizes are shares of the reference set, got {self.sizes}.")
        usual = tuple(task for task in _SWEPT if task in self.tasks) or self.tasks
        for name in ("swept", "seeded"):
            given = getattr(self, name)
            kept = usual if given is _USUAL else tuple(task for task in given if task in self.tasks)
            object.__setattr__(self, name, kept)

    @staticmethod
    def of_the_paper(models: tuple[str, ...], data: str | None, **changes: Any) -> Plan:
        """Its six tasks, whole, answered in words, by its own setting."""
        plan = Plan(
            models=models,
            data=data,
            tasks=PAPER_TASKS,
            swept=("medmcqa",),
            seeded=("gpqa", "mmlu", "usmle"),
            generate=True,
            limit=None,
            reference=None,
            steps_share=1.0,
            preset="paper",
            presets=("paper",),
        )
        return replace(plan, **changes)

    def of(self, model: str, task: str) -> Plan:
        """The part of one model and task."""
        seeded = self.seeded if model == self.models[0] else ()
        return replace(self, models=(model,), tasks=(task,), swept=self.swept, seeded=seeded)
