"""Evaluate a model on a task by one method, and store the result."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from knn_moe.errors import ConfigError, TaskDataError
from knn_moe.evaluation.store import Run, RunFolder, read_run
from knn_moe.inference.expert_usage import router_load
from knn_moe.memory.manifest import library_versions
from knn_moe.methods import Method, PreparedMethod
from knn_moe.routers.find import find_routers
from knn_moe.routers.fingerprint import identify
from knn_moe.routers.model_state import input_device, max_positions
from knn_moe.support.given import describe
from knn_moe.support.progress import OnProgress, Progress, ignore_progress
from knn_moe.support.registry import unknown_name
from knn_moe.tasks import questions as q
from knn_moe.tasks.answers import make_answer
from knn_moe.tasks.data import TaskData
from knn_moe.tasks.questions import Question
from knn_moe.tasks.sample import short_hash
from knn_moe.tasks.sandbox import check_programs
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, SCORINGS


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How the questions of a task are asked: the same for every method that is compared."""

    scoring: str | None = None  # generation, likelihood or text. None: see `scoring_for`
    batch_size: int = 16
    batch_tokens: int | None = None  # batches of at most so many tokens, not of batch_size items
    limit: int | None = None  # draw that many questions at random. None: all
    seed: int = 0  # for the draw
    max_new_tokens: int | None = None  # None: the task's default
    length: int = 256  # tokens of a window of text
    prompt_losses: bool = True  # measure the losses of prompts, which need logits everywhere
    load: bool = False  # measure the routers' load-balancing loss, padding included

    def __post_init__(self) -> None:
        if self.scoring is not None and self.scoring not in SCORINGS:
            raise ConfigError(unknown_name("scoring", self.scoring, SCORINGS))
        for name in ("batch_size", "batch_tokens", "limit", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if self.length < 2:
            raise ConfigError(f"length must be at least 2, got {self.length}.")

    def scoring_for(self, data: TaskData, tokenizer: Any) -> str:
        """Return the scoring that was chosen, or else the one that suits task and model.

        A model without a chat template was not trained to answer prompts. Its generated answers
        would mostly measure whether it finds their form, so choices are scored by likelihood.

        Raises:
            ConfigError: The task does not support the scoring that was chosen.
        """
        usual = self.usual_scoring(data)
        generated = self.scoring is None and usual == GENERATION
        if (
            generated
            and LIKELIHOOD in data.task.kind.scorings
            and not q.has_chat_template(tokenizer)
        ):
            return LIKELIHOOD
        return usual

    def usual_scoring(self, data: TaskData) -> str:
        """Return the scoring that was chosen, or else the task's usual one, whatever the model.

        Raises:
            ConfigError: The task does not support the scoring that was chosen.
        """
        supported = data.task.kind.scorings
        if self.scoring is not None and self.scoring not in supported:
            raise ConfigError(
                f"{data.task.name} is scored by {' or '.join(supported)}, not by {self.scoring}."
            )
        return self.scoring or supported[0]


@dataclass(frozen=True)
class QuestionSet:
    """The questions of a task, and the batches they are asked in."""

    questions: list[Question]
    batches: list[list[Question]]
    scoring: str
    reworded: bool = False  # whether the method has replaced the prompts
    new_tokens: int = 0  # that are generated after each prompt, at most


def prepare_questions(tokenizer: Any, data: TaskData, config: EvalConfig) -> QuestionSet:
    """Return the questions of a task in batches, the same for every method.

    Raises:
        ConfigError: The task does not support the scoring.
        TaskDataError: A row has no tokens, or the texts are too short.
    """
    scoring = config.scoring_for(data, tokenizer)
    if scoring == GENERATION:
        questions = q.make_prompts(tokenizer, data, q.draw_rows(data, config.limit, config.seed))
    elif scoring == LIKELIHOOD:
        questions = q.make_choices(tokenizer, data, q.draw_rows(data, config.limit, config.seed))
    else:
        rows = q.draw_rows(data, None, config.seed)
        questions = q.make_windows(tokenizer, rows, config.length, config.limit, config.seed)
    longest = config.max_new_tokens or data.task.kind.max_new_tokens
    new_tokens = longest if scoring == GENERATION else 0
    batches = _batch(questions, scoring, config, new_tokens)
    return QuestionSet(questions, batches, scoring, new_tokens=new_tokens)


def _batch(
    questions: list[Question], scoring: str, config: EvalConfig, new_tokens: int
) -> list[list[Question]]:
    if config.batch_tokens is not None:
        batches = q.batch_by_tokens(questions, config.batch_tokens, new_tokens)
    else:
        one_length = scoring != GENERATION
        batches = q.batch_by_length(questions, config.batch_size, one_length=one_length)
    return [[questions[place] for place in batch] for batch in batches]


def _reword(asked: QuestionSet, method: Method, config: EvalConfig) -> QuestionSet:
    """Let the method replace the prompts, whose new lengths need batches of their own."""
    questions = method.reword(asked.questions)
    if questions == asked.questions:
        return asked
    batches = _batch(questions, asked.scoring, config, asked.new_tokens)
    return replace(asked, questions=questions, batches=batches, reworded=True)


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    data: TaskData,
    method: Method | PreparedMethod,
    config: EvalConfig | None = None,
    *,
    folder: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    asked: QuestionSet | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Run:
    """Evaluate `model` on a task by one method.

    Args:
        model: The model; it is left as it was.
        method: The way to answer.
        config: How the questions are asked. None: the defaults.
        folder: Where the run is stored, batch by batch.
        resume: Continue a run that was interrupted.
        overwrite: Replace a run that exists.
        asked: What `prepare_questions` returned for these arguments. None: it is called.
        on_progress: Called after each batch.

    Returns:
        The whole run.

    Raises:
        ConfigError: `method` is no method.
        ProgramError: The task runs generated programs, without consent or where nothing confines
            them.
        RunError: There is a run in `folder` already, or it cannot be resumed.
        TaskDataError: A question is longer than the model can read.
    """
    if not isinstance(data, TaskData):
        raise TaskDataError(
            f"A task is evaluated with its rows, and {describe(data)} has none: open_task reads "
            f"them."
        )
    if not isinstance(method, Method | PreparedMethod):
        raise ConfigError(
            f"A model is evaluated by a method, such as ZeroShot() or KnnMoe(memory), and "
            f"{describe(method)} is none."
        )
    check_programs([data.task])
    config = config or EvalConfig()
    prepared = method if isinstance(method, PreparedMethod) else None
    method = method.method if isinstance(method, PreparedMethod) else method
    asked = _reword(asked or prepare_questions(tokenizer, data, config), method, config)
    check_lengths(model, data, asked)
    run, facts = RunFolder(Path(folder)), _describe(model, data, method, config, asked)
    facts["prepared_on"] = None if prepared is None else dict(prepared.prepared_on)
    was_training = model.training
    model.eval()
    began = time.perf_counter()
    try:
        # A method that does not fit the model fails before anything is written.
        watch = router_load(model) if config.load else nullcontext()
        with method.apply_to(model) as attached, watch as load:
            done = run.begin(facts, resume=resume, overwrite=overwrite)
            if not data.task.secret:
                kind = data.task.kind
                run.write_asked(
                    q.say_what_is_asked(tokenizer, kind, asked.scoring, asked.questions)
                )
            started = time.perf_counter()
            plain = make_answer(
                model,
                tokenizer,
                data.task,
                asked.scoring,
                config.max_new_tokens,
                prompt_losses=config.prompt_losses,
            )
            answer = method.make_answer(model, plain, asked.batches)
            finished, answered = {sample.batch for sample in done}, 0
            for number, batch in enumerate(asked.batches):
                if number not in finished:
                    run.append(answer(batch, number))
                answered += len(batch)
                on_progress(Progress(f"evaluating {method.name}", answered, len(asked.questions)))
            observed = method.observe(attached)
    finally:
        model.train(was_training)
    # The first part of a resumed run was not observed.
    more = {} if done else dict(observed)
    if load is not None and not done:
        more["load_balancing_loss"] = load.loss()
    more["attach_seconds"] = round(started - began, 2)
    if prepared is not None:
        more["preparation_seconds"] = round(prepared.seconds, 2)
    run.finish(time.perf_counter() - started, more)
    return read_run(Path(folder))


def check_lengths(model: nn.Module, data: TaskData, asked: QuestionSet) -> None:
    """Refuse questions that are longer than the model can read.

    Raises:
        TaskDataError: There are such questions.
    """
    most = max_positions(model) or math.inf
    long = [
        question.id
        for question in asked.questions
        if len(question.ids) + max((len(ids) for ids, _ in question.choices), default=0) > most
    ]
    if long:
        raise TaskDataError(
            f"{len(long)} questions of {data.task.name} are longer than the {most} tokens that "
            f"this model can read: {', '.join(long[:5])}. Remove them, or use another model."
        )


def _describe(
    model: nn.Module, data: TaskData, method: Method, config: EvalConfig, asked: QuestionSet
) -> dict[str, Any]:
    notes = data.task.note, explain_scoring(data, config, asked.scoring)
    return {
        **identify_run(model, data, config, asked.scoring),
        "title": data.task.title,
        "note": " ".join(filter(None, notes)),
        "method": method.name,
        "method_facts": dict(method.facts()),
        "questions": len(asked.questions),
        "asked": short_hash("".join(f"{one.id} {one.hash}" for one in asked.questions)),
        "batches": [len(batch) for batch in asked.batches],
        "reworded": asked.reworded,
        "secret": data.task.secret,
        "device": str(input_device(model)),
        "versions": library_versions(),
    }


def explain_scoring(data: TaskData, config: EvalConfig, scoring: str) -> str | None:
    """Say why a task is not scored as it usually is, if that is so."""
    if scoring == config.usual_scoring(data):
        return None
    return f"{data.task.name} is scored by {scoring}, because the model has no chat template."


def identify_run(
    model: nn.Module, data: TaskData, config: EvalConfig, scoring: str
) -> dict[str, Any]:
    """Return the facts that identify a run before its method is prepared, as JSON takes them."""
    return {
        "task": data.task.name,
        "scoring": scoring,
        "model": asdict(identify(model, find_routers(model))),
        "settings": asdict(config),  # the key of every run on disk
        "data": data.source,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
