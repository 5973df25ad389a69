"""Fine-tuning on a reference set: its split into two parts, the loss, and the training loop.

One training run is one learning rate for some epochs. The validation loss is measured after each
epoch, and the weights of the best epoch are kept. This module does not know which parameters are
trained: see sft.py and lora.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from knn_moe.adapt.calibrate.objective import find_temperature
from knn_moe.build.build import choice_tokens, reference_tokens
from knn_moe.equations.losses import choice_losses, target_losses
from knn_moe.errors import ConfigError, ReferenceSetError
from knn_moe.methods.task_context import TaskContext
from knn_moe.reference.choices import ChoiceBatch, ChoiceTokens
from knn_moe.reference.windows import Batch, ReferenceTokens
from knn_moe.routers.model_state import input_device

# How transformers marks a model on whose modules it has installed its recording hooks.
_HOOKS_INSTALLED: Final = "_output_capturing_hooks_installed"


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How weights are fine-tuned.

    The defaults are the paper's (appendix, "Training Implementation Details"). The paper states
    neither its learning rate nor how gradients are clipped.
    """

    rank: int = 32
    alpha: int = 32
    learning_rates: tuple[float, ...] | None = None  # tried on the validation part; None: three
    extensions: int = 2  # at most this many further rates, while the best is the outermost
    epochs: int = 3
    batch_size: int = 16
    weight_decay: float = 0.01
    clip: float = 1.0  # the largest norm of the gradient
    validation: float = 0.15  # share of the reference set
    seed: int | None = None  # None: that of the TaskContext

    def __post_init__(self) -> None:
        for name in ("rank", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.validation < 1:
            raise ConfigError(f"validation must be between 0 and 1, got {self.validation}.")
        rates = self.learning_rates
        if rates is not None and (not rates or not all(0 < rate < math.inf for rate in rates)):
            raise ConfigError(f"learning_rates must be positive numbers, got {rates}.")


@dataclass(frozen=True)
class TrainingSplit:
    """The windows to train on, and those that choose among what was trained, by their numbers."""

    tokens: ReferenceTokens = field(repr=False)
    train: list[int]
    validation: list[int]

    def batch(self, windows: Sequence[int]) -> Batch:
        """Return the tokens of `windows`, padded on the right."""
        return self.tokens.batch(list(windows))


def split_reference(
    context: TaskContext, share: float, seed: int, *, on_choices: bool = False
) -> TrainingSplit:
    """Split the reference set into windows for training and for validation.

    With `on_choices`, questions are read with their wrong answers, and what is lowered is the loss
    of the choice, as in calibration.

    Texts are tokenised as for a memory. The loss counts on completions; a plain text is one from
    its second token on. Windows without such a token are left out. All windows of an example are in
    the same part, because one part of a text gives the rest away.

    Raises:
        ReferenceSetError: Fewer than two examples have an answer.
    """
    config = context.build_config(tokens="completion")
    read = choice_tokens if on_choices else reference_tokens
    tokens = read(context.model, context.tokenizer, context.examples, config)
    by_example: dict[int, list[int]] = {}
    for window, owner in enumerate(tokens.provenance.example_of_window.tolist()):
        start, length, *_ = tokens.bounds[window]
        if bool(tokens.scored[start : start + length].any()):
            by_example.setdefault(owner, []).append(window)
    examples = list(by_example.values())
    if len(examples) < 2:
        raise ReferenceSetError(
            f"Fine-tuning needs at least 2 examples with an answer, one of them for validation, "
            f"but there are {len(examples)}. Use a larger reference set."
        )
    order = random.Random(seed).sample(range(len(examples)), len(examples))
    held_out = min(max(round(share * len(examples)), 1), len(examples) - 1)
    validation, train = (
        [window for place in sorted(places) for window in examples[place]]
        for places in (order[:held_out], order[held_out:])
    )
    if isinstance(tokens, ChoiceTokens):
        batches = tokens.batches(config.batch_tokens, validation)
        tokens = replace(tokens, temperature=find_temperature(context.model, batches))
    return TrainingSplit(tokens, train, validation)


def balance_weight(model: nn.Module) -> float:
    """Return the weight of the load-balancing loss in training, as the model's config says."""
    config: Any = model.config
    return float(getattr(config.get_text_config(), "router_aux_loss_coef", 0.0) or 0.0)


def training_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of the scored tokens plus the weighted load-balancing loss."""
    weight = balance_weight(model)
    output = _run(model, batch, output_router_logits=weight != 0)
    loss = _losses(output.logits, batch).mean()
    return loss + weight * output.aux_loss.to(loss.device) if weight else loss


@torch.no_grad()
def validation_loss(model: nn.Module, split: TrainingSplit, batch_size: int) -> float:
    """Return the mean loss of the scored tokens of the validation part, without balancing."""
    total, count = 0.0, 0
    windows = sorted(split.validation, key=lambda window: int(split.tokens.lengths[window]))
    for start in range(0, len(windows), batch_size):
        batch = split.batch(windows[start : start + batch_size])
        losses = _losses(_run(model, batch, output_router_logits=False).logits, batch)
        total += float(losses.double().sum())
        count += len(losses)
    return total / count


def _run(model: nn.Module, batch: Batch, *, output_router_logits: bool) -> Any:
    batch = batch.to(input_device(model))
    # Said explicitly, since the config's default may differ; but not every model knows the option.
    option = {"output_router_logits": output_router_logits} if balance_weight(model) else {}
    return model(input_ids=batch.ids, attention_mask=batch.real.long(), use_cache=False, **option)


def _losses(logits: Tensor, batch: Batch) -> Tensor:
    """Return the losses [n] of the scored tokens, or of the choices; only the logits of scored
    tokens are widened to fp32."""
    scored = batch.scored[:, :-1].to(logits.device)
    targets = batch.ids[:, 1:].to(logits.device)[scored]
    losses = target_losses(logits[:, :-1][scored][None], targets[None])[0]
    if not isinstance(batch, ChoiceBatch):
        return losses
    line = scored.nonzero()[:, 0]
    summed = losses.new_zeros(len(batch.ids)).index_add(0, line, losses)
    return choice_losses(-summed * batch.weight.to(losses.device), batch.lines.to(losses.device))


class WeightChange(Protocol):
    """What becomes of one parameter."""

    def apply_to(self, weight: Tensor) -> Tensor:
        """Return the new parameter, in the shape and dtype and on the device of `weight`."""


WeightChanges: TypeAlias = Mapping[str, WeightChange]  # by the parameter's name


@dataclass(frozen=True)
class Trainable:
    """A model some of whose parameters take gradients, and how to copy what they have become."""

    model: nn.Module
    changes: Callable[[], WeightChanges]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


@dataclass
class TrainingRun:
    """One learning rate, the losses of its steps and epochs, and the best epoch's weights."""

    rate: float
    parameters: int  # how many numbers are trained
    losses: list[float] = field(default_factory=list)  # after each step, balancing included
    validation: list[float] = field(default_factory=list)  # after each epoch
    changes: WeightChanges | None = field(default=None, repr=False)  # of the best epoch

    @property
    def best_loss(self) -> float:
        """The lowest validation loss; infinite if none is finite."""
        return min(filter(math.isfinite, self.validation), default=math.inf)


def steps_per_epoch(split: TrainingSplit, config: TuneConfig) -> int:
    """Return the number of optimiser steps in an epoch."""
    return math.ceil(len(split.train) / config.batch_size)


def train(
    trainable: Trainable,
    split: TrainingSplit,
    rate: float,
    config: TuneConfig,
    seed: int,
    on_step: Callable[[int], None] = lambda epoch: None,
) -> TrainingRun:
    """Train with AdamW, whose learning rate falls linearly from `rate` to zero.

    Args:
        trainable: The model and which of its parameters change.
        split: The windows to train on and to validate by.
        rate: The first step's learning rate.
        config: Epochs, batch size, weight decay and clipping.
        seed: For the order of the windows, which differs between epochs.
        on_step: Called with the epoch, counted from 1, after each step.
    """
    model, parameters = trainable.model, trainable.parameters
    steps = config.epochs * steps_per_epoch(split, config)
    optimiser = MasterAdamW(parameters, lr=rate, weight_decay=config.weight_decay)
    schedule = LambdaLR(optimiser, lambda step: max(1 - step / steps, 0.0))
    run = TrainingRun(rate, sum(parameter.numel() for parameter in parameters))
    for epoch in range(config.epochs):
        model.train()
        windows = random.Random(f"{seed} {epoch}").sample(split.train, len(split.train))
        for start in range(0, len(windows), config.batch_size):
            loss = training_loss(model, split.batch(windows[start : start + config.batch_size]))
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, config.clip)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            run.losses.append(float(loss.detach()))
            on_step(epoch + 1)
        model.eval()
        validation = validation_loss(model, split, config.batch_size)
        if validation < run.best_loss:
            run.changes = trainable.changes()
        run.validation.append(validation)
    return run


class MasterAdamW(torch.optim.AdamW):
    """AdamW on fp32 copies of weights in another dtype, so that rounding loses no small step."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        self._rounded = [
            (parameter, nn.Parameter(parameter.detach().float()))
            for parameter in parameters
            if parameter.dtype != torch.float32
        ]
        exact = [parameter for parameter in parameters if parameter.dtype == torch.float32]
        masters = [master for _, master in self._rounded]
        super().__init__([*exact, *masters], lr=lr, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter, master in self._rounded:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step(closure)
        for parameter, master in self._rounded:
            parameter.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter, _ in self._rounded:
            parameter.grad = None


@contextmanager
def restore_hooks_and_order(model: nn.Module) -> Iterator[None]:
    """Undo on exit what neither transformers nor PEFT undoes.

    transformers leaves the hooks that record router logits on the modules. PEFT's parametrisations
    leave the parameters of a module in another order, which shows in the state_dict.
    """
    before = [
        (
            module,
            list(module._parameters),
            set(module._forward_hooks),
            _HOOKS_INSTALLED in vars(module),
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, names, hooks, installed in before:
            for name in names:
                module._parameters[name] = module._parameters.pop(name)
            for key in set(module._forward_hooks) - hooks:
                del module._forward_hooks[key]
            if not installed:
                vars(module).pop(_HOOKS_INSTALLED, None)
