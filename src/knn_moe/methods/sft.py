"""The fine-tuning baselines (§5.1): LoRA on every linear map, and the routers alone.

Both follow one protocol: 85 % of the reference set to train on and 15 % to choose by; three epochs,
of which the one with the lowest validation loss counts; several learning rates, of which the best
counts. The result is kept as changes of parameters, which are applied as plain weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from knn_moe.errors import ModelError
from knn_moe.methods.lora import add_adapters
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.methods.training_loop import (
    Trainable,
    TrainingRun,
    TrainingSplit,
    TuneConfig,
    WeightChanges,
    balance_weight,
    restore_hooks_and_order,
    split_reference,
    steps_per_epoch,
    train,
    validation_loss,
)
from knn_moe.routers.find import find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import freeze, input_device, uncompiled
from knn_moe.support.progress import StepCounter

# Around the best for models of a few million parameters. Larger models want lower rates, which the
# search reaches by extending the range.
LORA_RATES: Final = (3e-4, 1e-3, 3e-3)
ROUTER_RATES: Final = (1e-3, 3e-3, 1e-2)

# Makes some parameters trainable for a while.
Unfreeze: TypeAlias = Callable[[nn.Module, TuneConfig], AbstractContextManager[Trainable]]


@dataclass(frozen=True)
class FineTuned(Method):
    """The model with fine-tuned weights."""

    changes: WeightChanges = field(repr=False)
    training: Mapping[str, Any] = field(repr=False)  # how the changes were found, for JSON
    name: str = "sft"

    def facts(self) -> Mapping[str, Any]:
        return self.training

    def apply_to(self, model: nn.Module) -> AbstractContextManager[Any]:
        return apply_changes(model, self.changes)


@contextmanager
def apply_changes(model: nn.Module, changes: WeightChanges) -> Iterator[None]:
    """Replace weights by changed ones; put the untouched originals back on exit."""
    model = uncompiled(model)
    parameters = {name: model.get_parameter(name) for name in changes}
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        with torch.inference_mode(False), torch.no_grad():
            for name, change in changes.items():
                parameters[name].data = change.apply_to(before[name])
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


def prepare_sft(context: TaskContext, config: TuneConfig | None = None) -> FineTuned:
    """Train LoRA adapters on every linear map, experts and routers included."""
    return _prepare("sft", context, config or TuneConfig(), add_adapters, LORA_RATES)


def prepare_router_sft(context: TaskContext, config: TuneConfig | None = None) -> FineTuned:
    """Train the routers' own weights and nothing else."""
    return _prepare("sft-router", context, config or TuneConfig(), unfreeze_routers, ROUTER_RATES)


def prepare_router_sft_on_choices(
    context: TaskContext, config: TuneConfig | None = None
) -> FineTuned:
    """Train the routers' own weights to tell right answers from wrong ones, as calibration does."""
    name, config = "sft-router-choices", config or TuneConfig()
    return _prepare(name, context, config, unfreeze_routers, ROUTER_RATES)


@dataclass(frozen=True)
class Replacement:
    """A new value of a parameter."""

    value: Tensor

    def apply_to(self, weight: Tensor) -> Tensor:
        return self.value.to(weight)


@contextmanager
def unfreeze_routers(model: nn.Module, config: TuneConfig) -> Iterator[Trainable]:
    """Make copies of the routers' parameters trainable; put the originals back on exit."""
    routers = {id(own) for router in find_routers(model) for own in router.module.parameters()}
    chosen = {name: each for name, each in model.named_parameters() if id(each) in routers}
    before = {name: parameter.data for name, parameter in chosen.items()}

    def copy_changes() -> WeightChanges:
        return {name: Replacement(parameter.detach().clone()) for name, parameter in chosen.items()}

    with freeze(model), restore_hooks_and_order(model):
        try:
            for parameter in chosen.values():
                parameter.data = parameter.data.clone()
                parameter.requires_grad_(True)
            yield Trainable(model, copy_changes)
        finally:
            for name, parameter in chosen.items():
                parameter.data = before[name]
                parameter.grad = None
                parameter.requires_grad_(False)


def search_rates(
    rates: tuple[float, ...], extensions: int, try_rate: Callable[[float], TrainingRun]
) -> list[TrainingRun]:
    """Try learning rates; while the best is the outermost, try one more on its side.

    Returns:
        All runs in the order in which they were tried. Only the best one keeps its weights.
    """
    runs: list[TrainingRun] = []
    waiting = sorted(set(rates))
    while waiting:
        for rate in waiting:
            runs.append(try_rate(rate))
            best = _best(runs)
            runs = [run if run is best else replace(run, changes=None) for run in runs]
        next_rate = _rate_beyond([run.rate for run in runs], best.rate)
        waiting = [next_rate] if next_rate and extensions > 0 else []
        extensions -= 1
    return runs


def _best(runs: list[TrainingRun]) -> TrainingRun:
    return min(runs, key=lambda run: run.best_loss)


def _rate_beyond(rates: list[float], best: float) -> float | None:
    """Return a rate as far beyond the best as its neighbour is inside; None: not outermost."""
    ordered = sorted(rates)
    if len(ordered) < 2 or best not in (ordered[0], ordered[-1]):
        return None
    neighbour = ordered[1] if best == ordered[0] else ordered[-2]
    return float(f"{best * best / neighbour:.6g}")


def _prepare(
    name: str,
    context: TaskContext,
    config: TuneConfig,
    unfreeze: Unfreeze,
    usual_rates: tuple[float, ...],
) -> FineTuned:
    seed = context.seed if config.seed is None else config.seed
    rates = config.learning_rates or usual_rates
    model = uncompiled(context.model)
    on_choices = name == "sft-router-choices"
    split = split_reference(context, config.validation, seed, on_choices=on_choices)
    steps = config.epochs * steps_per_epoch(split, config)
    counter = StepCounter(context.on_progress, steps * len(rates))

    def try_rate(rate: float) -> TrainingRun:
        torch.manual_seed(seed)
        counter.total = max(counter.total, counter.done + steps)
        with unfreeze(model, config) as trainable:
            return train(
                trainable,
                split,
                rate,
                config,
                seed,
                on_step=lambda epoch: counter.steps_of(f"lr {rate:g}, epoch {epoch}")(),
            )

    with _gradients(model), freeze(model):
        untouched = validation_loss(model, split, config.batch_size)
        runs = search_rates(rates, config.extensions, try_rate)
    best = _best(runs)
    if best.changes is None:
        tried = ", ".join(f"{run.rate:g}" for run in runs)
        raise ModelError(
            f"The loss is not finite at any learning rate ({tried}). Load the model in float32."
        )
    training: dict[str, Any] = _describe_runs(runs, rates) | _describe_split(split)
    if unfreeze is add_adapters:
        training |= {"rank": config.rank, "alpha": config.alpha}
    training |= {"untouched_validation_loss": untouched, "seed": seed}
    training |= {"epochs": config.epochs, "batch_size": config.batch_size}
    training |= {"weight_decay": config.weight_decay, "balance_weight": balance_weight(model)}
    return FineTuned(best.changes, training, name)


def _describe_runs(runs: list[TrainingRun], rates: tuple[float, ...]) -> dict[str, Any]:
    best = _best(runs)
    losses = {
        f"{run.rate:g}": [loss if math.isfinite(loss) else None for loss in run.validation]
        for run in sorted(runs, key=lambda run: run.rate)
    }
    return {
        "learning_rate": best.rate,
        "best_epoch": best.validation.index(best.best_loss) + 1,
        "validation_loss": best.best_loss,
        "validation_losses": losses,  # by learning rate, after each epoch
        "rates_beyond": [run.rate for run in runs if run.rate not in rates],
        "trainable_parameters": best.parameters,
    }


def _describe_split(split: TrainingSplit) -> dict[str, int]:
    bounds = [split.tokens.bounds[window] for window in split.train]
    scored = (split.tokens.scored[each.start : each.start + each.length] for each in bounds)
    return {
        "tokens": sum(each.length for each in bounds),
        "scored_tokens": sum(int(each.sum()) for each in scored),
        "windows": len(split.train),
        "validation_windows": len(split.validation),
    }


@contextmanager
def _gradients(model: nn.Module) -> Iterator[None]:
    """Enable gradients, use experts that are fast with them, and keep torch's random state."""
    device = input_device(model)
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.inference_mode(False),
        torch.enable_grad(),
        use_grouped_experts(model),
    ):
        yield
