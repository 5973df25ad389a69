"""A study: the runs that tables are made from, each made once and kept on disk.

Runs lie where `knn-moe eval` would write them, in RUNS/MODEL/TASK/NAME, so that a stopped study
continues with the first one that is missing. Knows nothing of how a table looks.
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
from knn_moe.support.progress import OnProgress, Progress, ignore_progress
from knn_moe.tasks import open_task
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.reference_set import reference_rows
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, TEXT

Load: TypeAlias = Callable[[str], tuple[Any, Any]]  # a name → a model and its tokenizer

_STUDY: Final = "study.json"
_MORE_LIBRARIES: Final = ("peft", "sentence-transformers", "faiss-cpu")


@dataclass
class Study:
    """A plan, the folder of its runs, and the model that is loaded now."""

    plan: Plan
    folder: Path
    load: Load
    on_progress: OnProgress = ignore_progress
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = "float32"
    jobs: int = 1  # processes
    whole: Plan | None = None  # the plan of which `plan` is a part
    _loaded: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)
    _data: dict[str, TaskData] = field(default_factory=dict, repr=False)
    _contexts: dict[tuple[Any, ...], TaskContext] = field(default_factory=dict, repr=False)

    def check(self) -> None:
        """Refuse a study that could not be finished, before anything is run.

        Raises:
            KnnMoeError: A task is unknown or has no reference set, two names are the same, or the
                folder holds the runs of another study.
        """
        for task in self.plan.tasks:
            reference_rows(self.data(task))
        for what, names in (
            ("models", [folder_name(model) for model in self.plan.models]),
            ("tasks", [self.data(task).task.name for task in self.plan.tasks]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"Two {what} have the name {twice[0]!r}. Leave one of them out.")
        path = self.folder / _STUDY
        if path.exists():
            known, ours = _read_json(path), self._describe()
            changed = sorted(name for name in ours if known.get(name) != ours[name])
            if changed:
                name = changed[0]
                raise RunError(
                    f"The study in {str(self.folder)!r} has {name} {known.get(name)!r}, not "
                    f"{ours[name]!r}. Choose another folder, or remove that study."
                )

    def _describe(self) -> dict[str, Any]:
        """Return what all runs of a folder have in common."""
        plan = self.whole or self.plan
        sources = {task: self.data(task).source for task in plan.tasks}
        found = {**asdict(plan), "data": sources, "dtype": self.dtype, "jobs": self.jobs}
        found |= {"hardware": hardware(self.device), "versions": versions()}
        described: dict[str, Any] = json.loads(json.dumps(found))
        return described

    def _claim_folder(self) -> None:
        """Write down in the folder which study it holds."""
        if not (self.folder / _STUDY).exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / _STUDY, json.dumps(self._describe(), indent=1) + "\n")

    def restrict(self, model: str, task: str) -> Study:
        """Return the part of the study for one model and task, sharing what is loaded."""
        return replace(self, plan=self.plan.restrict(model, task), whole=self.plan)

    def data(self, task: str) -> TaskData:
        if task not in self._data:
            self._data[task] = open_task(task, self.plan.data)
        return self._data[task]

    def reference_length(self, task: str) -> int:
        """Return the number of characters in the task's reference rows."""
        return sum(len(str(each)) for each in self.data(task).reference[: self.plan.reference])

    def scoring(self, task: str) -> str:
        ways = self.data(task).task.kind.scorings
        wanted = GENERATION if self.plan.generate else LIKELIHOOD
        return wanted if wanted in ways else ways[0]

    def is_text(self, task: str) -> bool:
        return self.scoring(task) == TEXT

    def title(self, task: str) -> str:
        return self.data(task).task.title

    def is_defined(self, method: str, task: str) -> bool:
        """Return whether a method is installed and can answer this kind of task."""
        spec = METHODS[method]
        return spec.installed and (spec.texts or not self.is_text(task))

    def choose_methods(self, names: Sequence[str]) -> list[str]:
        """Return `names` without "knn-paper" if that is what the plan's "knn" is anyway."""
        same = self.plan.preset == "paper"
        return [name for name in names if not (same and name == "knn-paper")]

    def eval_config(self, task: str, *, load: bool = False) -> EvalConfig:
        return EvalConfig(
            scoring=self.scoring(task),
            batch_size=self.plan.batch_size,
            limit=self.plan.limit,
            seed=self.plan.seed,
            load=load,
        )

    def model(self, name: str) -> tuple[Any, Any]:
        """Return a model and its tokenizer. Only one is held at a time: it may fill the device."""
        if name not in self._loaded:
            self._loaded.clear()
            self._contexts.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._loaded[name] = self.load(name)
            self._claim_folder()
        return self._loaded[name]

    def context(self, model: str, task: str, share: float = 1.0) -> TaskContext:
        """Return the context for a share of the reference rows.

        Methods of one context share what they prepare.
        """
        network, tokenizer = self.model(model)
        key = model, task, share
        if key not in self._contexts:
            rows = len(self.data(task).reference)
            most = min(self.plan.reference or rows, rows)
            stage = f"{model}, {task}: preparing"
            self._contexts[key] = TaskContext(
                network,
                tokenizer,
                self.data(task),
                self.scoring(task),
                limit=max(1, round(most * share)),
                seed=self.plan.seed,
                batch_size=self.plan.batch_size,
                preset=self.plan.preset,
                folder=self.run_folder(model, task),
                on_progress=lambda step: self.on_progress(step._replace(stage=stage)),
            )
        return self._contexts[key]

    def run(self, model: str, task: str, method: str) -> Run:
        """Run a registered method on a task, with the whole reference set."""
        return self.run_variant(
            model, task, method, lambda: prepare(method, self.context(model, task))
        )

    def run_variant(
        self, model: str, task: str, name: str, make: Callable[[], Method | PreparedMethod]
    ) -> Run:
        """Run the method that `make` returns, or read the run called `name` if it is there."""
        folder = self.run_folder(model, task) / name
        known = find_finished_run(folder, {})
        if known is not None:
            return known
        self.on_progress(Progress(f"{model}, {task}: preparing {name}", 0, 1))
        network, tokenizer = self.model(model)
        stage = f"{model}, {task}: {name}"
        return evaluate(
            network,
            tokenizer,
            self.data(task),
            make(),
            self.eval_config(task, load=_has_load(network)),
            folder=folder,
            overwrite=True,
            on_progress=lambda step: self.on_progress(step._replace(stage=stage)),
        )

    def measure(self, model: str, task: str, name: str, measure: Callable[[], Any]) -> Any:
        """Return what `measure` returns, as JSON takes it; measure it once for the study."""
        path = self.run_folder(model, task) / f"{name}.json"
        if path.exists():
            return _read_json(path)
        self.on_progress(Progress(f"{model}, {task}: {name}", 0, 1))
        value = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(value))
        return value

    def run_folder(self, model: str, task: str) -> Path:
        return self.folder / "runs" / folder_name(model) / self.data(task).task.name

    def facts(self, tasks: Sequence[str]) -> Mapping[str, Any]:
        """Return what a reader must know of how a table was measured."""
        plan = self.plan
        return {
            "models": list(plan.models),
            "tasks": {task: self._describe_task(task) for task in tasks},
            "seed": plan.seed,
            "preset": plan.preset,
            "batch_size": plan.batch_size,
            "dtype": self.dtype,
            "hardware": hardware(self.device),
            "jobs": self.jobs,
            "versions": versions(),
        }

    def _describe_task(self, task: str) -> str:
        data, plan = self.data(task), self.plan
        rows = min(plan.reference or len(data.reference), len(data.reference))
        if self.is_text(task):
            count = "all" if plan.limit is None else f"at most {plan.limit:,}"
            items = f"{count} windows of {self.eval_config(task).length} tokens"
        else:
            items = f"{min(plan.limit or len(data.test), len(data.test)):,} questions"
        note = f" ({data.task.note.rstrip('.')})" if data.task.note else ""
        return f"{items} by {self.scoring(task)}, {rows:,} reference rows{note}"


def folder_name(model: str) -> str:
    """Return a name as a folder may have it."""
    return re.sub(r"[^\w.-]+", "--", model).strip("-.") or "model"


def _has_load(model: Any) -> bool:
    """Return whether the routers return what their load can be measured from."""
    try:
        with router_load(model):
            return True
    except UnsupportedModelError:
        return False


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise RunError(f"Cannot read {str(path)!r} ({error}). Remove it.") from None


def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on."""
    found = dict(library_versions())
    for name in _MORE_LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def hardware(device: torch.device) -> str:
    """Describe the machine in a few words."""
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{os.cpu_count()} {platform.machine()} CPU cores"
