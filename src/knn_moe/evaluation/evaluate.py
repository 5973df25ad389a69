"""Put a task to a model by one method, and write down what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from knn_moe.errors import ConfigError, TaskDataError
from knn_moe.evaluation.store import Run, RunFolder, read_run
from knn_moe.inference.expert_usage import router_load
from knn_moe.memory.manifest import library_versions
from knn_moe.methods import Method, PreparedMethod
from knn_moe.routers.find import find_routers
from knn_moe.routers.fingerprint import identify
from knn_moe.routers.model_state import input_device
from knn_moe.tasks import questions as q
from knn_moe.tasks.answers import Answer, by_generation, by_likelihood, by_token
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.questions import Question
from knn_moe.tasks.sample import hashed
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, SCORINGS

OnProgress: TypeAlias = Callable[[int, int], None]  # questions done, of how many


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How a task is put. The same for every method that is compared."""

    scoring: str | None = None  # generation, likelihood or text. None: the task's usual one
    batch_size: int = 16
    limit: int | None = None  # questions, drawn at random
    seed: int = 0  # of that draw
    max_new_tokens: int | None = None  # None: the task's own
    length: int = 256  # tokens of a window of text
    load: bool = False  # measure the routers' load-balancing loss, padding included

    def __post_init__(self) -> None:
        if self.scoring is not None and self.scoring not in SCORINGS:
            raise ConfigError(
                f"Unknown scoring {self.scoring!r}. Available: {', '.join(SCORINGS)}."
            )
        for name in ("batch_size", "limit", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if self.length < 2:
            raise ConfigError(f"length must be at least 2, got {self.length}.")

    def scoring_of(self, data: TaskData) -> str:
        ways = data.task.kind.scorings
        if self.scoring is not None and self.scoring not in ways:
            raise ConfigError(
                f"{data.task.name} is scored by {' or '.join(ways)}, not by {self.scoring}."
            )
        return self.scoring or ways[0]


@dataclass(frozen=True)
class Asked:
    """The questions of a task and the batches they are put in."""

    questions: list[Question]
    batches: list[list[int]]
    scoring: str
    reworded: bool = False  # by the method, in prompts of its own

    def batched(self) -> list[list[Question]]:
        return [[self.questions[at] for at in batch] for batch in self.batches]


def ask(tokenizer: Any, data: TaskData, config: EvalConfig) -> Asked:
    """The same questions in the same batches for every method."""
    scoring = config.scoring_of(data)
    if scoring == GENERATION:
        made = q.prompts(tokenizer, data, q.chosen_rows(data, config.limit, config.seed))
    elif scoring == LIKELIHOOD:
        made = q.choices(tokenizer, data, q.chosen_rows(data, config.limit, config.seed))
    else:
        rows = q.chosen_rows(data, None, config.seed)
        made = q.windows(tokenizer, rows, config.length, config.limit, config.seed)
    return Asked(made, _batches(made, scoring, config), scoring)


def _batches(questions: list[Question], scoring: str, config: EvalConfig) -> list[list[int]]:
    return q.batches(questions, config.batch_size, one_length=scoring != GENERATION)


def _reworded(asked: Asked, method: Method, config: EvalConfig) -> Asked:
    """As the method words it. Other prompts have other lengths, and batches of their own."""
    questions = method.reword(asked.questions)
    if questions == asked.questions:
        return asked
    return Asked(questions, _batches(questions, asked.scoring, config), asked.scoring, True)


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    data: TaskData,
    method: Method | PreparedMethod,
    config: EvalConfig | None = None,
    *,
    folder: Path,
    resume: bool = False,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Run:
    """Every sample goes to `folder` as it comes; with `resume`, a killed run goes on."""
    config = config or EvalConfig()
    given = method if isinstance(method, PreparedMethod) else None
    method = method.method if isinstance(method, PreparedMethod) else method
    asked = _reworded(ask(tokenizer, data, config), method, config)
    _refuse_long(model, data, asked)
    place, facts = RunFolder(folder), _facts(model, data, method, config, asked)
    facts["prepared_on"] = None if given is None else dict(given.prepared_on)
    was_training = model.training
    model.eval()
    began = time.perf_counter()
    try:
        # What cannot be put on the model is told before anything is written.
        watch = router_load(model) if config.load else nullcontext()
        with method.apply_to(model) as attached, watch as load:
            done = place.begin(facts, resume=resume, overwrite=overwrite)
            started = time.perf_counter()
            plain = answer_of(model, tokenizer, data, config)
            answer = method.make_answer(model, plain, asked.batched())
            _put(asked, answer, place, {sample.batch for sample in done}, on_progress)
            seen = method.observe(attached)
    finally:
        model.train(was_training)
    # The first part of a resumed run was not observed.
    more = {} if done else dict(seen)
    if load is not None and not done:
        more["load_balancing_loss"] = load.loss()
    more["attach_seconds"] = round(started - began, 2)
    if given is not None:
        more["preparation_seconds"] = round(given.seconds, 2)
    place.finish(time.perf_counter() - started, more)
    return read_run(folder)


def _refuse_long(model: nn.Module, data: TaskData, asked: Asked) -> None:
    """Beyond the positions it was made for, a model answers nonsense."""
    config: Any = getattr(model, "config", None)
    most = getattr(config, "max_position_embeddings", None)
    long = [
        question.id
        for question in asked.questions
        if most
        and len(question.ids) + max((len(ids) for ids, _ in question.choices), default=0) > most
    ]
    if long:
        raise TaskDataError(
            f"{len(long)} questions of {data.task.name} are longer than the {most} tokens this "
            f"model can read ({', '.join(long[:5])}): leave them out, or use another model."
        )


def _put(
    asked: Asked,
    answer: Answer,
    place: RunFolder,
    finished: set[int],
    on_progress: OnProgress | None,
) -> None:
    """Batch by batch, but for those that are finished."""
    count = 0
    for number, batch in enumerate(asked.batched()):
        if number not in finished:
            place.add(answer(batch, number))
        count += len(batch)
        if on_progress:
            on_progress(count, len(asked.questions))


def answer_of(model: nn.Module, tokenizer: Any, data: TaskData, config: EvalConfig) -> Answer:
    """How a batch is put to a model, as it then is."""
    scoring = config.scoring_of(data)
    if scoring == GENERATION:
        tokens = config.max_new_tokens or data.task.kind.max_new_tokens
        return by_generation(model, tokenizer, data.task, tokens)
    return by_likelihood(model) if scoring == LIKELIHOOD else by_token(model)


def _facts(
    model: nn.Module, data: TaskData, method: Method, config: EvalConfig, asked: Asked
) -> dict[str, Any]:
    return {
        **known_facts(model, data, config),
        "title": data.task.title,
        "note": data.task.note,
        "method": method.name,
        "method_facts": dict(method.facts()),
        "questions": len(asked.questions),
        "asked": hashed("".join(_hashes(asked.questions))),
        "batches": [len(batch) for batch in asked.batches],
        "reworded": asked.reworded,
        "device": str(input_device(model)),
        "versions": library_versions(),
    }


def known_facts(model: nn.Module, data: TaskData, config: EvalConfig) -> dict[str, Any]:
    """What is known of a run before its method is prepared."""
    return {
        "task": data.task.name,
        "scoring": config.scoring_of(data),
        "model": asdict(identify(model, find_routers(model))),
        "settings": asdict(config),
        "data": data.source,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def _hashes(questions: Sequence[Question]) -> list[str]:
    return [f"{question.id} {question.hash}" for question in questions]
