"""The fine-tuning baselines (§5.1): LoRA on every linear map, and the routers alone.

One protocol for both: 85 % of the reference set to train on, 15 % to choose by; three epochs, of
which the one with the lowest validation loss counts; some learning rates, of which the best counts.
What was learned is kept as changes of parameters, and put on a model as plain weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from knn_moe.errors import ModelError
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.methods.training_loop import (
    IGNORED,
    Changes,
    Course,
    Split,
    Trainable,
    TuneConfig,
    balance_weight,
    rebuilt,
    split_reference,
    train_plainly,
    validation_loss,
)
from knn_moe.methods.tuning import adapters, has_trl, require_trl, train_with_trl
from knn_moe.routers.find import find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import freeze, input_device
from knn_moe.support.progress import OnProgress, Progress

# Around what is best for models of a few million parameters; large ones want less, and the search
# goes on to there.
LORA_RATES: Final = (3e-4, 1e-3, 3e-3)
ROUTER_RATES: Final = (1e-3, 3e-3, 1e-2)

# Makes some parameters trainable, for a while.
Opens: TypeAlias = Callable[[nn.Module, TuneConfig], AbstractContextManager[Trainable]]


@dataclass(frozen=True)
class Tuned(Method):
    """The model with other weights."""

    changes: Changes = field(repr=False)
    learned: Mapping[str, Any] = field(repr=False)
    name: str = "sft"

    def facts(self) -> Mapping[str, Any]:
        return self.learned

    def apply_to(self, model: nn.Module) -> AbstractContextManager[Any]:
        return changed(model, self.changes)


@contextmanager
def changed(model: nn.Module, changes: Changes) -> Iterator[None]:
    """Weights in place of others, which wait aside and come back untouched."""
    model = getattr(model, "_orig_mod", model)
    parameters = {name: model.get_parameter(name) for name in changes}
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        with torch.inference_mode(False), torch.no_grad():
            for name, change in changes.items():
                parameters[name].data = change.onto(before[name])
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


def prepare_sft(context: TaskContext, config: TuneConfig | None = None) -> Tuned:
    """LoRA on every linear map, experts and routers included."""
    config = config or TuneConfig()
    return _prepare("sft", context, config, adapters, config.learning_rates or LORA_RATES)


def prepare_router_sft(context: TaskContext, config: TuneConfig | None = None) -> Tuned:
    """The routers' own weights, and nothing else."""
    config = config or TuneConfig()
    rates = config.learning_rates or ROUTER_RATES
    return _prepare("sft-router", context, config, router_weights, rates)


@dataclass(frozen=True)
class Replaced:
    """A parameter's other value."""

    value: Tensor

    def onto(self, weight: Tensor) -> Tensor:
        return self.value.to(weight)


@contextmanager
def router_weights(model: nn.Module, config: TuneConfig) -> Iterator[Trainable]:
    """The routers' parameters trainable, as long as this lasts; copies of them."""
    routers = {id(own) for router in find_routers(model) for own in router.module.parameters()}
    chosen = {name: each for name, each in model.named_parameters() if id(each) in routers}
    before = {name: parameter.data for name, parameter in chosen.items()}

    def changes() -> Changes:
        return {name: Replaced(parameter.detach().clone()) for name, parameter in chosen.items()}

    with freeze(model), rebuilt(model):
        try:
            for parameter in chosen.values():
                parameter.data = parameter.data.clone()
                parameter.requires_grad_(True)
            yield Trainable(model, changes)
        finally:
            for name, parameter in chosen.items():
                parameter.data = before[name]
                parameter.grad = None
                parameter.requires_grad_(False)


@dataclass(frozen=True)
class Trial:
    """One learning rate, and the validation loss after each epoch."""

    rate: float
    validation: list[float]
    parameters: int  # how many numbers were trained
    changes: Changes | None = field(repr=False)  # the best epoch's; None: let go, or no number

    @property
    def loss(self) -> float:
        return min(filter(math.isfinite, self.validation), default=math.inf)


def search_rates(
    rates: tuple[float, ...], extensions: int, train: Callable[[float], Trial]
) -> list[Trial]:
    """Try some learning rates; while the best is the outermost, one more on its side. The weights
    of the best alone are kept."""
    trials: list[Trial] = []
    waiting = sorted(set(rates))
    while waiting:
        for rate in waiting:
            trials.append(train(rate))
            best = min(trials, key=lambda trial: trial.loss)
            trials = [trial if trial is best else replace(trial, changes=None) for trial in trials]
        beyond = _beyond([trial.rate for trial in trials], best.rate)
        waiting = [beyond] if beyond and extensions > 0 else []
        extensions -= 1
    return trials


def _beyond(rates: list[float], best: float) -> float | None:
    """As far from the outermost rate as that is from its neighbour; None: the best is inside."""
    ordered = sorted(rates)
    if len(ordered) < 2 or best not in (ordered[0], ordered[-1]):
        return None
    neighbour = ordered[1] if best == ordered[0] else ordered[-2]
    return float(f"{best * best / neighbour:.6g}")


def _prepare(
    name: str, context: TaskContext, config: TuneConfig, opens: Opens, rates: tuple[float, ...]
) -> Tuned:
    trainer = config.trainer or ("trl" if has_trl() else "plain")
    if trainer == "trl":
        require_trl()
    seed = context.seed if config.seed is None else config.seed
    model = getattr(context.model, "_orig_mod", context.model)
    split = split_reference(context, config.validation, seed)
    progress = _Progress(context.on_progress, len(rates))

    def train(rate: float) -> Trial:
        torch.manual_seed(seed)
        with opens(model, config) as trainable:
            course = Course(trainable, split, rate, config, seed, progress.step)
            progress.begin(rate, course.steps)
            if trainer == "trl":
                train_with_trl(course, context.tokenizer)
            else:
                train_plainly(course)
            count = sum(parameter.numel() for parameter in trainable.parameters)
        return Trial(rate, course.validation, count, course.best)

    with _training(model), freeze(model):
        untouched = validation_loss(model, split.valid, config.batch_size)
        trials = search_rates(rates, config.extensions, train)
    best = min(trials, key=lambda trial: trial.loss)
    if best.changes is None:
        tried = ", ".join(f"{trial.rate:g}" for trial in trials)
        raise ModelError(f"No learning rate of {tried} gives a loss that is a number: tune fp32.")
    lora = {"rank": config.rank, "alpha": config.alpha} if opens is adapters else {}
    learned = {**lora, "trainer": trainer, **_results(trials, rates, untouched), **_sizes(split)}
    learned |= {"epochs": config.epochs, "batch_size": config.batch_size, "seed": seed}
    learned |= {"weight_decay": config.weight_decay, "balance_weight": balance_weight(model)}
    return Tuned(best.changes, learned, name)


def _results(trials: list[Trial], rates: tuple[float, ...], untouched: float) -> dict[str, Any]:
    best = min(trials, key=lambda trial: trial.loss)
    losses = {
        f"{trial.rate:g}": [loss if math.isfinite(loss) else None for loss in trial.validation]
        for trial in sorted(trials, key=lambda trial: trial.rate)
    }
    return {
        "learning_rate": best.rate,
        "best_epoch": best.validation.index(best.loss) + 1,
        "validation_loss": best.loss,
        "untouched_validation_loss": untouched,
        "validation_losses": losses,  # by learning rate, after each epoch
        "rates_beyond": [trial.rate for trial in trials if trial.rate not in rates],
        "trainable_parameters": best.parameters,
    }


def _sizes(split: Split) -> dict[str, int]:
    return {
        "tokens": sum(len(window.ids) for window in split.train),
        "scored_tokens": sum(label != IGNORED for window in split.train for label in window.labels),
        "windows": len(split.train),
        "validation_windows": len(split.valid),
    }


class _Progress:
    """Steps of all learning rates, told to whoever shows them."""

    def __init__(self, send: OnProgress, rates: int) -> None:
        self.send = send
        self.expected, self.begun = rates, 0
        self.done = self.total = 0
        self.rate = 0.0

    def begin(self, rate: float, steps: int) -> None:
        self.begun += 1
        self.rate = rate
        self.total = steps * max(self.begun, self.expected)

    def step(self, epoch: int) -> None:
        self.done += 1
        self.send(Progress(f"lr {self.rate:g}, epoch {epoch}", self.done, self.total))


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Gradients on, whatever surrounds us; experts that are fast with them; all generators of
    random numbers as they were afterwards, since trainers seed them."""
    python, numbers = random.getstate(), np.random.get_state()
    devices = [model_device] if (model_device := input_device(model)).type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            torch.enable_grad(),
            use_grouped_experts(model),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
