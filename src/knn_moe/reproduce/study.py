"""What all tables are made from: models, tasks and methods, each pair run once.

Runs lie on disk as those of `knn-moe eval` do, RUNS/MODEL/TASK/NAME: a study that was stopped goes
on with the first one that is missing. Knows nothing of how a table looks.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from knn_moe.embedded import EMBEDDED_MODELS
from knn_moe.errors import ConfigError, RunError
from knn_moe.evaluation.run import EvalConfig, evaluate
from knn_moe.evaluation.runs import Run, read_run
from knn_moe.header import library_versions
from knn_moe.methods import METHODS, Method, Prepared, Setting, prepare
from knn_moe.tasks import open_task
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, TEXT

# what is being done, how much of it, of how much
OnStep: TypeAlias = Callable[[str, int, int], None]
Load: TypeAlias = Callable[[str], tuple[Any, Any]]  # a name → a model and its tokenizer
Make: TypeAlias = Callable[[Setting], Method]

PAPER_TASKS: Final = ("gpqa", "mmlu", "supergpqa", "usmle", "medmcqa", "mbpp")
_STUDY: Final = "study.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked of whom. The defaults are for small models on a CPU; the paper's own plan is
    `Plan.of_the_paper`."""

    models: tuple[str, ...] = EMBEDDED_MODELS
    tasks: tuple[str, ...] = ("mmlu", "usmle", "medmcqa", "text_medical")
    ablation: tuple[str, ...] = ("medmcqa", "text_medical")  # tasks of the sweeps
    generate: bool = False  # answers in words, as in the paper; else by likelihood
    data: str | None = None
    limit: int | None = 100  # questions of a task, or windows of text
    reference: int | None = 60  # rows of its reference set
    sizes: tuple[float, ...] = (0.25, 0.5, 1.0)  # of the reference set, where that is varied
    preset: str = "strong"
    seed: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("models", "tasks"):
            if not getattr(self, name):
                raise ConfigError(f"A study needs at least one of its {name}.")
        if not all(0 < size <= 1 for size in self.sizes):
            raise ConfigError(f"sizes are shares of the reference set, got {self.sizes}.")
        unknown = [task for task in self.ablation if task not in self.tasks]
        if unknown:
            object.__setattr__(self, "ablation", self.tasks)

    @staticmethod
    def of_the_paper(models: tuple[str, ...], data: str | None, **changes: Any) -> Plan:
        plan = Plan(
            models=models,
            data=data,
            tasks=PAPER_TASKS,
            ablation=("medmcqa",),
            generate=True,
            limit=None,
            reference=None,
            preset="paper",
        )
        return replace(plan, **changes)


@dataclass
class Study:
    """A plan, where its runs lie, and the model that is loaded now."""

    plan: Plan
    folder: Path
    load: Load
    on_step: OnStep
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    models: tuple[str, ...] = ()  # those that tables are made of now; none: the plan's
    _loaded: tuple[str, Any, Any] | None = field(default=None, repr=False)
    _data: dict[str, TaskData] = field(default_factory=dict, repr=False)
    _settings: dict[tuple[Any, ...], Setting] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.models = self.models or self.plan.models

    def of(self, model: str) -> Study:
        """The same of one model, to make all its runs while it is loaded."""
        return replace(self, models=(model,))

    def begin(self) -> None:
        """Refuse a folder that holds another study's runs."""
        path = self.folder / _STUDY
        plan = json.loads(json.dumps(asdict(self.plan)))
        if path.exists():
            known = json.loads(path.read_text(encoding="utf8"))
            changed = sorted(name for name in plan if known.get(name) != plan[name])
            if changed:
                name = changed[0]
                raise RunError(
                    f"The study in {str(self.folder)!r} has {name} {known.get(name)!r}, not "
                    f"{plan[name]!r}: choose another folder, or remove it."
                )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf8")

    def data(self, task: str) -> TaskData:
        if task not in self._data:
            self._data[task] = open_task(task, self.plan.data)
        return self._data[task]

    def scoring(self, task: str) -> str:
        ways = self.data(task).task.kind.scorings
        wanted = GENERATION if self.plan.generate else LIKELIHOOD
        return wanted if wanted in ways else ways[0]

    def is_text(self, task: str) -> bool:
        return self.scoring(task) == TEXT

    def title(self, task: str) -> str:
        return self.data(task).task.title

    def defined(self, method: str, task: str) -> bool:
        """Whether a method can be asked such a task at all."""
        return METHODS[method].texts or not self.is_text(task)

    def config(self, task: str) -> EvalConfig:
        return EvalConfig(
            scoring=self.scoring(task),
            batch_size=self.plan.batch_size,
            limit=self.plan.limit,
            seed=self.plan.seed,
            load=True,
        )

    def model(self, name: str) -> tuple[Any, Any]:
        """One model at a time: some fill the device."""
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None
            self._settings.clear()
            self._loaded = (name, *self.load(name))
        return self._loaded[1:]

    def setting(self, model: str, task: str, share: float = 1.0) -> Setting:
        """Of a share of the reference rows. Methods of one setting share what they prepare."""
        key = model, task, share
        if self._loaded is None or self._loaded[0] != model or key not in self._settings:
            network, tokenizer = self.model(model)
            rows = len(self.data(task).reference)
            asked = min(self.plan.reference or rows, rows)
            self._settings[key] = Setting(
                network,
                tokenizer,
                self.data(task),
                self.scoring(task),
                limit=max(1, round(asked * share)),
                seed=self.plan.seed,
                batch_size=self.plan.batch_size,
                preset=self.plan.preset,
                folder=self._place(model, task),
                reuse=True,
            )
        return self._settings[key]

    def run(self, model: str, task: str, method: str) -> Run:
        """A method of the registry on a task, with the whole reference set."""
        return self.variant(model, task, method, lambda: self._prepared(model, task, method))

    def _prepared(self, model: str, task: str, method: str) -> Prepared:
        setting = self.setting(model, task)
        what = f"{model}, {task}: preparing {method}"
        setting.on_progress = lambda done, total, note: self.on_step(what, done, total)
        return prepare(method, setting)

    def variant(
        self, model: str, task: str, name: str, make: Callable[[], Method | Prepared]
    ) -> Run:
        """Whatever `make` makes, run under a name of its own; not made if the run is there."""
        folder = self._place(model, task) / name
        known = _finished(folder)
        if known is not None:
            return known
        self.on_step(f"{model}, {task}: preparing {name}", 0, 1)
        network, tokenizer = self.model(model)
        method = make()
        return evaluate(
            network,
            tokenizer,
            self.data(task),
            method,
            self.config(task),
            folder=folder,
            overwrite=True,
            on_progress=lambda done, total: self.on_step(f"{model}, {task}: {name}", done, total),
        )

    def measured(self, model: str, task: str, name: str, measure: Callable[[], float]) -> float:
        """A number that is no run's; not measured again if it is there."""
        path = self._place(model, task) / f"{name}.json"
        if path.exists():
            return float(json.loads(path.read_text(encoding="utf8")))
        self.on_step(f"{model}, {task}: {name}", 0, 1)
        value = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value), encoding="utf8")
        return value

    def _place(self, model: str, task: str) -> Path:
        return self.folder / "runs" / Path(model).name / self.data(task).task.name

    def facts(self, tasks: Sequence[str]) -> Mapping[str, Any]:
        """What a reader must know of how it was measured."""
        plan = self.plan
        return {
            "models": list(self.models),
            "tasks": {task: self._asked(task) for task in tasks},
            "seed": plan.seed,
            "preset": plan.preset,
            "batch_size": plan.batch_size,
            "hardware": hardware(self.device),
            "versions": library_versions(),
        }

    def _asked(self, task: str) -> str:
        data, plan = self.data(task), self.plan
        what = "windows of 256 tokens" if self.is_text(task) else "questions"
        asked = "all" if plan.limit is None else f"{plan.limit:,}"
        rows = min(plan.reference or len(data.reference), len(data.reference))
        return f"{asked} {what} by {self.scoring(task)}, {rows:,} reference rows"


def _finished(folder: Path) -> Run | None:
    try:
        run = read_run(folder)
    except RunError:
        return None
    return run if run.facts["finished"] else None


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{os.cpu_count()} {platform.machine()} CPU cores"
