"""What all tables are made from: models, tasks and methods, each of which is run once.

Runs lie on disk as those of `knn-moe eval` do, RUNS/MODEL/TASK/NAME: a study that was stopped goes
on with the first one that is missing. Knows nothing of how a table looks.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from knn_moe.errors import ConfigError, RunError, UnsupportedModelError
from knn_moe.evaluation.evaluate import EvalConfig, evaluate
from knn_moe.evaluation.store import Run, find_finished_run
from knn_moe.inference.expert_usage import router_load
from knn_moe.memory.manifest import library_versions
from knn_moe.methods import METHODS, Method, PreparedMethod, TaskContext, prepare
from knn_moe.reproduce.plan import Plan
from knn_moe.support.files import write_whole
from knn_moe.tasks import open_task
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.reference_set import reference_rows
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, TEXT

# what is being done, how much of it, of how much
OnStep: TypeAlias = Callable[[str, int, int], None]
Load: TypeAlias = Callable[[str], tuple[Any, Any]]  # a name → a model and its tokenizer

_STUDY: Final = "study.json"
_MORE_LIBRARIES: Final = ("peft", "sentence-transformers", "faiss-cpu")


@dataclass
class Study:
    """A plan, where its runs lie, and the model that is loaded now."""

    plan: Plan
    folder: Path
    load: Load
    on_step: OnStep
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = "float32"
    jobs: int = 1  # of this kind, at a time
    whole: Plan | None = None  # of which `plan` is a part
    _loaded: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)
    _data: dict[str, TaskData] = field(default_factory=dict, repr=False)
    _contexts: dict[tuple[Any, ...], TaskContext] = field(default_factory=dict, repr=False)

    def check(self) -> None:
        """Refuse what could not be done, before anything is: tasks and names; a folder that holds
        another study's runs."""
        for task in self.plan.tasks:
            reference_rows(self.data(task))
        for what, names in (
            ("models", [_folder_name(model) for model in self.plan.models]),
            ("tasks", [self.data(task).task.name for task in self.plan.tasks]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"Two {what} have the name {twice[0]!r}: study one of them.")
        path = self.folder / _STUDY
        if path.exists():
            known, ours = _read_json(path), self._described()
            changed = sorted(name for name in ours if known.get(name) != ours[name])
            if changed:
                name = changed[0]
                raise RunError(
                    f"The study in {str(self.folder)!r} has {name} {known.get(name)!r}, not "
                    f"{ours[name]!r}: choose another folder, or remove it."
                )

    def _described(self) -> dict[str, Any]:
        """What all runs of a folder have in common."""
        plan = self.whole or self.plan
        sources = {task: self.data(task).source for task in plan.tasks}
        found = {**asdict(plan), "data": sources, "dtype": self.dtype, "jobs": self.jobs}
        found |= {"hardware": hardware(self.device), "versions": versions()}
        described: dict[str, Any] = json.loads(json.dumps(found))
        return described

    def _claim(self) -> None:
        """From here on the folder is this study's."""
        if not (self.folder / _STUDY).exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / _STUDY, json.dumps(self._described(), indent=1) + "\n")

    def of(self, model: str, task: str) -> Study:
        """The same of one model and task. What is loaded and prepared is shared."""
        return replace(self, plan=self.plan.of(model, task), whole=self.plan)

    def data(self, task: str) -> TaskData:
        if task not in self._data:
            self._data[task] = open_task(task, self.plan.data)
        return self._data[task]

    def length(self, task: str) -> int:
        """Of the task's reference rows, in characters."""
        return sum(len(str(each)) for each in self.data(task).reference[: self.plan.reference])

    def scoring(self, task: str) -> str:
        ways = self.data(task).task.kind.scorings
        wanted = GENERATION if self.plan.generate else LIKELIHOOD
        return wanted if wanted in ways else ways[0]

    def is_text(self, task: str) -> bool:
        return self.scoring(task) == TEXT

    def title(self, task: str) -> str:
        return self.data(task).task.title

    def defined(self, method: str, task: str) -> bool:
        """Whether a method can be asked such a task at all, here."""
        entry = METHODS[method]
        return entry.installed and (entry.texts or not self.is_text(task))

    def methods(self, names: Sequence[str]) -> list[str]:
        """Those of a table: the paper's setting once, if it is the plan's."""
        same = self.plan.preset == "paper"
        return [name for name in names if not (same and name == "knn-paper")]

    def config(self, task: str, *, load: bool = False) -> EvalConfig:
        return EvalConfig(
            scoring=self.scoring(task),
            batch_size=self.plan.batch_size,
            limit=self.plan.limit,
            seed=self.plan.seed,
            load=load,
        )

    def model(self, name: str) -> tuple[Any, Any]:
        """One model at a time: some fill the device."""
        if name not in self._loaded:
            self._loaded.clear()
            self._contexts.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._loaded[name] = self.load(name)
            self._claim()
        return self._loaded[name]

    def context(self, model: str, task: str, share: float = 1.0) -> TaskContext:
        """Of a share of the reference rows. Methods of one setting share what they prepare."""
        network, tokenizer = self.model(model)
        key = model, task, share
        if key not in self._contexts:
            rows = len(self.data(task).reference)
            asked = min(self.plan.reference or rows, rows)
            what = f"{model}, {task}: preparing"
            self._contexts[key] = TaskContext(
                network,
                tokenizer,
                self.data(task),
                self.scoring(task),
                limit=max(1, round(asked * share)),
                seed=self.plan.seed,
                batch_size=self.plan.batch_size,
                preset=self.plan.preset,
                folder=self.place(model, task),
                on_progress=lambda step: self.on_step(what, step.done, step.total),
            )
        return self._contexts[key]

    def run(self, model: str, task: str, method: str) -> Run:
        """A method of the registry on a task, with the whole reference set."""
        return self.variant(model, task, method, lambda: prepare(method, self.context(model, task)))

    def variant(
        self, model: str, task: str, name: str, make: Callable[[], Method | PreparedMethod]
    ) -> Run:
        """Whatever `make` makes, run under a name of its own; not made if the run is there."""
        folder = self.place(model, task) / name
        known = find_finished_run(folder, {})
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
            self.config(task, load=_has_load(network)),
            folder=folder,
            overwrite=True,
            on_progress=lambda step: self.on_step(
                f"{model}, {task}: {name}", step.done, step.total
            ),
        )

    def measured(self, model: str, task: str, name: str, measure: Callable[[], Any]) -> Any:
        """What is no run, as JSON takes it; not measured again if it is there."""
        path = self.place(model, task) / f"{name}.json"
        if path.exists():
            return _read_json(path)
        self.on_step(f"{model}, {task}: {name}", 0, 1)
        value = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(value))
        return value

    def place(self, model: str, task: str) -> Path:
        return self.folder / "runs" / _folder_name(model) / self.data(task).task.name

    def facts(self, tasks: Sequence[str]) -> Mapping[str, Any]:
        """What a reader must know of how it was measured."""
        plan = self.plan
        return {
            "models": list(plan.models),
            "tasks": {task: self._asked(task) for task in tasks},
            "seed": plan.seed,
            "preset": plan.preset,
            "batch_size": plan.batch_size,
            "dtype": self.dtype,
            "hardware": hardware(self.device),
            "jobs": self.jobs,
            "versions": versions(),
        }

    def _asked(self, task: str) -> str:
        data, plan = self.data(task), self.plan
        rows = min(plan.reference or len(data.reference), len(data.reference))
        if self.is_text(task):
            count = "all" if plan.limit is None else f"at most {plan.limit:,}"
            asked = f"{count} windows of {self.config(task).length} tokens"
        else:
            asked = f"{min(plan.limit or len(data.test), len(data.test)):,} questions"
        note = f" ({data.task.note.rstrip('.')})" if data.task.note else ""
        return f"{asked} by {self.scoring(task)}, {rows:,} reference rows{note}"


def _folder_name(model: str) -> str:
    return re.sub(r"[^\w.-]+", "--", model).strip("-.") or "model"


def _has_load(model: Any) -> bool:
    """Some routers do not return what a load could be measured from."""
    try:
        with router_load(model):
            return True
    except UnsupportedModelError:
        return False


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise RunError(f"{str(path)!r} cannot be read ({error}): remove it.") from None


def versions() -> dict[str, str]:
    found = dict(library_versions())
    for name in _MORE_LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{os.cpu_count()} {platform.machine()} CPU cores"
