"""The configuration that all tables of a study share: models, tasks and sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from knn_moe.errors import ConfigError
from knn_moe.support.embedded_models import EMBEDDED_MODELS

_DEFAULT: Any = None
_USUALLY_SWEPT: Final = ("medmcqa", "text_medical")
PAPER_TASKS: Final = ("gpqa", "mmlu", "supergpqa", "usmle", "medmcqa", "mbpp")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is evaluated. The defaults are for small models on a CPU."""

    models: tuple[str, ...] = EMBEDDED_MODELS
    tasks: tuple[str, ...] = ("mmlu", "medmcqa", "text_medical")
    # The tasks of the sweeps, and those on which fine-tuning is repeated with other seeds.
    # Default: two of them, or all tasks if neither is among them.
    swept: tuple[str, ...] = _DEFAULT
    seeded: tuple[str, ...] = _DEFAULT
    generate: bool = False  # score generated answers, as the paper does; else likelihoods
    data: str | None = None  # as for `knn-moe eval --data`
    limit: int | None = 64  # questions of a task, or windows of text
    reference: int | None = 40  # rows of its reference set
    sizes: tuple[float, ...] = (0.25, 0.5, 1.0)  # shares of the reference set in the size sweep
    steps_share: float = 0.25  # the share of it in the sweep of steps, which builds many memories
    preset: str | None = None  # of kNN-MoE; None: calibrated if possible
    presets: tuple[str, ...] = ("paper",)  # of the sweeps
    seed: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("models", "tasks"):
            if not getattr(self, name):
                raise ConfigError(f"A study needs at least one of its {name}.")
        if not all(0 < size <= 1 for size in (*self.sizes, self.steps_share)):
            raise ConfigError(
                f"sizes and steps_share are shares of the reference set, above 0 and up to 1; got "
                f"{self.sizes} and {self.steps_share}."
            )
        usual = tuple(task for task in _USUALLY_SWEPT if task in self.tasks) or self.tasks
        for name in ("swept", "seeded"):
            given = getattr(self, name)
            kept = usual if given is _DEFAULT else tuple(x for x in given if x in self.tasks)
            object.__setattr__(self, name, kept)

    @staticmethod
    def of_the_paper(models: tuple[str, ...], data: str | None, **changes: Any) -> Plan:
        """Return the paper's own plan: its six tasks, whole, with generated answers."""
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
        )
        return replace(plan, **changes)

    def restrict(self, model: str, task: str) -> Plan:
        """Return the part of the plan that needs this model and task only."""
        seeded = self.seeded if model == self.models[0] else ()
        return replace(self, models=(model,), tasks=(task,), swept=self.swept, seeded=seeded)
