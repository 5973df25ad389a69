"""Make the runs of a study of pretrained models, each once, and keep them on disk.

A run lies in RUNS/MODEL/TASK/NAME. Runs whose methods share a preparation follow each other, so
that nothing is prepared twice; runs that are there are not made again. Knows nothing of tables.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from knn_moe.errors import ConfigError, KnnMoeError, ModelTooLargeError
from knn_moe.evaluation.evaluate import EvalConfig, QuestionSet, evaluate, prepare_questions
from knn_moe.evaluation.store import Run, find_finished_run
from knn_moe.methods import METHODS, PreparedMethod, TaskContext, prepare
from knn_moe.methods.catalogue import NOTHING
from knn_moe.methods.registry import prepared_on
from knn_moe.methods.sft import (
    prepare_router_sft,
    prepare_router_sft_on_choices,
    prepare_sft,
)
from knn_moe.methods.training_loop import TuneConfig
from knn_moe.reference.examples import Example
from knn_moe.reproduce.pretrained import plan as p
from knn_moe.reproduce.pretrained.plan import PretrainedPlan, RunSpec
from knn_moe.reproduce.study import Load, folder_name, hardware, versions
from knn_moe.support.files import write_whole
from knn_moe.support.progress import OnProgress, ignore_progress
from knn_moe.tasks import open_task
from knn_moe.tasks.data import TaskData, add_extra_reference
from knn_moe.tasks.sandbox import check_programs
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, TEXT

_MACHINE: Final = "machine.json"
_TUNE: Final = {
    "sft": prepare_sft,
    "sft-router": prepare_router_sft,
    p.BY_CHOICES: prepare_router_sft_on_choices,
}
Learned: TypeAlias = tuple[str | None, int | None]  # the source and size of a reference set


@dataclass(frozen=True)
class Group:
    """Runs that are made one after the other, because their methods share a preparation."""

    model: str
    learned: Learned
    specs: Sequence[RunSpec]

    def by_method(self) -> dict[str, list[RunSpec]]:
        """Return the runs of each method."""
        found: dict[str, list[RunSpec]] = {}
        for spec in self.specs:
            found.setdefault(spec.method, []).append(spec)
        return found


@dataclass
class JoinedContext(TaskContext):
    """The reference sets of several tasks as one; `data` is that of the first."""

    parts: Sequence[TaskContext] = ()

    @cached_property
    def examples(self) -> list[Example]:
        return [example for part in self.parts for example in part.examples]

    def facts(self) -> dict[str, Any]:
        named = {part.data.task.name: part.facts()["reference"] for part in self.parts}
        return {**super().facts(), "reference": named}


@dataclass
class PretrainedStudy:
    """A plan, the folder of its runs, and the model that is loaded now."""

    plan: PretrainedPlan
    folder: Path
    load: Load
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = "float32"
    on_progress: OnProgress = ignore_progress
    failures: list[str] = field(default_factory=list)  # runs that could not be made, and why
    crowded: bool = False  # whether one of them did not fit in memory
    _loaded: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)
    _data: dict[str, TaskData] = field(default_factory=dict, repr=False)
    _asked: dict[str, QuestionSet] = field(default_factory=dict, repr=False)

    def data(self, task: str) -> TaskData:
        """Return the rows of a task; its reference set is all that there is."""
        if task not in self._data:
            found = open_task(task, self.plan.data)
            self._data[task] = add_extra_reference(found, self.plan.data)
        return self._data[task]

    def check(self, parts: Sequence[str], methods: Sequence[str]) -> None:
        """Refuse what was asked for by name and has nothing to run, before a model is loaded.

        Raises:
            ConfigError: A part has no task, or a method cannot answer any.
        """
        specs = {part: self.specs(part, self.plan.models[0]) for part in self.plan.parts}
        used = {spec.method for found in specs.values() for spec in found}
        empty = [name for name in methods if METHODS[name].installed and name not in used]
        empty += [f"The part {part!r}" for part in parts if not specs[part]]
        if empty:
            raise ConfigError(
                f"{empty[0]} has nothing to run on {', '.join(self.plan.tasks)}. Add a task that "
                f"it can be measured on, or leave it out."
            )

    def scoring(self, task: str) -> str:
        ways = self.data(task).task.kind.scorings
        return LIKELIHOOD if LIKELIHOOD in ways else ways[0]

    def tasks_by(self, scoring: str) -> list[str]:
        return [task for task in self.plan.tasks if self.scoring(task) == scoring]

    def size(self, task: str, wanted: int | None = None) -> int:
        usual = self.plan.texts if self.scoring(task) == TEXT else self.plan.reference
        return min(wanted or usual, len(self.data(task).reference))

    def specs(self, part: str, model: str) -> list[RunSpec]:
        """Return the runs that a part needs for a model, zero-shot first."""
        make: dict[str, Callable[[str], list[RunSpec]]] = {
            p.ACCURACY: lambda model: self._own(model, self.tasks_by(LIKELIHOOD)),
            p.TEXT_LOSS: lambda model: self._own(model, self.tasks_by(TEXT)),
            p.GENERATION: lambda model: self._own(model, self.tasks_by(GENERATION)),
            p.GROWTH: self._growth,
            p.TRANSFER: self._transfer,
            p.TOGETHER: self._together,
        }
        found = make[part](model)
        base = (RunSpec(model, spec.task, p.BASE) for spec in found)
        return list(dict.fromkeys((*base, *found)))

    def _own(self, model: str, tasks: Sequence[str]) -> list[RunSpec]:
        return [
            self.own(model, task, method)
            for task in tasks
            for method in self.plan.methods
            if self._is_defined(method, task)
        ]

    def own(self, model: str, task: str, method: str, size: int | None = None) -> RunSpec:
        """Return the run of a method with the task's own reference set."""
        if METHODS[method].needs == NOTHING:
            return RunSpec(model, task, method)
        return RunSpec(model, task, method, task, self.size(task, size))

    def _growth(self, model: str) -> list[RunSpec]:
        return [
            self.own(model, task, method, size)
            for task in self.plan.growing
            for size in self.plan.sizes
            if size <= len(self.data(task).reference)
            for method in self._chosen(p.LEARNING)
            if self._is_defined(method, task)
        ]

    def _transfer(self, model: str) -> list[RunSpec]:
        targets = (*self.tasks_by(LIKELIHOOD), *self.tasks_by(TEXT))
        return [
            RunSpec(model, task, method, source, self.size(source))
            for source in self.plan.sources
            if self.scoring(source) == LIKELIHOOD
            for method in self._chosen(p.CARRIED)
            for task in targets
            if task == source or task not in p.LONG
        ]

    def _together(self, model: str) -> list[RunSpec]:
        tasks, methods = self.tasks_by(LIKELIHOOD), self._chosen(p.CARRIED)
        joined = [
            RunSpec(model, task, method, p.ALL, self.plan.reference)
            for method in methods
            for task in tasks
        ]
        return [*joined, *(self.own(model, task, method) for task in tasks for method in methods)]

    def _chosen(self, methods: Sequence[str]) -> list[str]:
        return [m for m in methods if m in self.plan.methods and METHODS[m].installed]

    def _is_defined(self, method: str, task: str) -> bool:
        spec = METHODS[method]
        return spec.installed and (spec.texts or self.scoring(task) != TEXT)

    def find_run(self, spec: RunSpec) -> Run | None:
        """Return a run that was finished with this plan's questions, or None."""
        settings = asdict(self.eval_config(spec.task))
        return find_finished_run(self.run_folder(spec), {"settings": settings})

    def run_folder(self, spec: RunSpec) -> Path:
        task = self.data(spec.task).task.name
        return self.folder / "runs" / folder_name(spec.model) / task / folder_name(spec.name)

    def eval_config(self, task: str) -> EvalConfig:
        return EvalConfig(
            scoring=self.scoring(task),
            batch_tokens=self.plan.batch_tokens,
            limit=self.plan.limit,
            seed=self.plan.seed,
            prompt_losses=False,
        )

    def missing(self) -> list[RunSpec]:
        """Return the runs of the plan that are not there, in the order in which they are made."""
        return [
            spec
            for model in self.plan.models
            for spec in _unique(self.specs(part, model) for part in self.plan.parts)
            if self.find_run(spec) is None
        ]

    def make_runs(self, deadline: float | None = None) -> Iterator[tuple[RunSpec, Run]]:
        """Make the missing runs and yield each.

        A run that fails is added to `failures`, and the others are made all the same.

        Args:
            deadline: Do not begin another run after this time of `time.monotonic`.

        Raises:
            ProgramError: A run needs generated programs, which are not allowed or not possible.
        """
        for group in self.missing_groups():
            yield from self.make_group(group, deadline)

    def missing_groups(self) -> list[Group]:
        """Return the missing runs in groups, in the order in which they are made.

        Raises:
            ProgramError: A run needs generated programs, which are not allowed or not possible.
        """
        missing = self.missing()
        check_programs(self.data(spec.task).task for spec in missing)
        groups: dict[tuple[str, Learned, str], list[RunSpec]] = {}
        for spec in missing:
            learned, method = (spec.source, spec.size), p.PREPARED_WITH.get(spec.method)
            groups.setdefault((spec.model, learned, method or spec.method), []).append(spec)
        return [Group(model, learned, specs) for (model, learned, _), specs in groups.items()]

    def make_group(
        self, group: Group, deadline: float | None = None
    ) -> Iterator[tuple[RunSpec, Run]]:
        """Make the runs of a group, as `make_runs` does."""
        context: TaskContext | None = None
        for method, specs in group.by_method().items():
            if deadline is not None and time.monotonic() >= deadline:
                return
            try:
                context = context or self.context(group.model, specs[0].task, group.learned)
                prepared = self._prepare(group.model, method, context, group.learned)
            except (KnnMoeError, torch.OutOfMemoryError) as error:
                self._add_failure(f"{group.model}, {specs[0].name}", error)
                continue
            yield from self._evaluate(specs, prepared, deadline)

    def _evaluate(
        self, specs: Sequence[RunSpec], prepared: PreparedMethod, deadline: float | None
    ) -> Iterator[tuple[RunSpec, Run]]:
        for spec in specs:
            if deadline is not None and time.monotonic() >= deadline:
                return
            network, tokenizer = self.model(spec.model)
            try:
                run = evaluate(
                    network,
                    tokenizer,
                    self.data(spec.task),
                    prepared,
                    self.eval_config(spec.task),
                    folder=self.run_folder(spec),
                    overwrite=True,
                    asked=self._questions(spec.task, tokenizer),
                    on_progress=self._show(str(spec)),
                )
            except (KnnMoeError, torch.OutOfMemoryError) as error:
                self._add_failure(str(spec), error)
                continue
            yield spec, run

    def _add_failure(self, run: str, error: Exception) -> None:
        self.failures.append(f"{run}: {error}")
        self.crowded |= isinstance(error, (ModelTooLargeError, torch.OutOfMemoryError))

    def _questions(self, task: str, tokenizer: Any) -> QuestionSet:
        """Return the questions of a task; tokenising them can take longer than answering."""
        if task not in self._asked:
            self._asked[task] = prepare_questions(
                tokenizer, self.data(task), self.eval_config(task)
            )
        return self._asked[task]

    def model(self, name: str) -> tuple[Any, Any]:
        """Return a model and its tokenizer. Only one is held at a time: it may fill the device."""
        if name not in self._loaded:
            self._loaded.clear()
            self._asked.clear()
            gc.collect()
            self._loaded[name] = self.load(name)
            self.folder.mkdir(parents=True, exist_ok=True)
            machine = {"hardware": hardware(self.device), "dtype": self.dtype}
            text = json.dumps({**machine, "versions": versions()}, indent=1)
            with suppress(FileNotFoundError):  # another process has just written the same
                write_whole(self.folder / _MACHINE, f"{text}\n")
        return self._loaded[name]

    def machine(self) -> Mapping[str, Any]:
        """Return where the runs were made, which need not be where their tables are."""
        path = self.folder / _MACHINE
        return json.loads(path.read_text(encoding="utf8")) if path.exists() else {}

    def context(self, model: str, task: str, learned: Learned) -> TaskContext:
        """Return what methods are prepared on; of a method that learns nothing, the task alone."""
        source, size = learned
        network, tokenizer = self.model(model)
        if source == p.ALL:
            parts = [
                self.context(model, each, (each, self.size(each, size)))
                for each in self.tasks_by(LIKELIHOOD)
            ]
            return JoinedContext(
                network,
                tokenizer,
                parts[0].data,
                LIKELIHOOD,
                seed=self.plan.seed,
                build_tokens=self.plan.build_tokens,
                on_progress=self._show(f"{model}, all benchmarks: preparing"),
                parts=parts,
            )
        source = source or task
        return TaskContext(
            network,
            tokenizer,
            self.data(source),
            self.scoring(source),
            limit=size,
            seed=self.plan.seed,
            build_tokens=self.plan.build_tokens,
            on_progress=self._show(f"{model}, {source}: preparing"),
        )

    def _prepare(
        self, model: str, method: str, context: TaskContext, learned: Learned
    ) -> PreparedMethod:
        rate = self._known_rate(model, method) if self.plan.one_rate else None
        if rate is None:
            prepared = prepare(method, context)
        else:
            started = time.perf_counter()
            tuned = _TUNE[method](context, TuneConfig(learning_rates=(rate,)))
            seconds = time.perf_counter() - started
            prepared = PreparedMethod(tuned, seconds, prepared_on(method, context))
        return replace(prepared, prepared_on={**prepared.prepared_on, "source": learned[0]})

    def _known_rate(self, model: str, method: str) -> float | None:
        """Return the learning rate that a finished run of this method found, if there is one."""
        if method not in _TUNE:
            return None
        runs = self.folder / "runs" / folder_name(model)
        for path in sorted(runs.glob(f"*/{method}-*/run.json")):
            facts = json.loads(path.read_text(encoding="utf8"))
            if facts["method"] == method and len(facts["method_facts"]["validation_losses"]) > 1:
                return float(facts["method_facts"]["learning_rate"])
        return None

    def _show(self, stage: str) -> OnProgress:
        return lambda step: self.on_progress(step._replace(stage=stage))


def _unique(lists: Iterator[list[RunSpec]]) -> list[RunSpec]:
    return list(dict.fromkeys(spec for specs in lists for spec in specs))
