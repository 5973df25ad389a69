"""Fine-tuning on a reference set: its windows, their split, one run of training, a plain loop.

A run is one learning rate for some epochs; after each the validation loss is taken, and the best
weights are kept. Whoever trains (the loop here, or TRL: tuning.py) trains the same run: the same
batches in the same order, the same optimiser, the same measure. Knows nothing of adapters.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from knn_moe.build.build import reference_tokens
from knn_moe.errors import ConfigError, ReferenceSetError
from knn_moe.methods.task_context import TaskContext
from knn_moe.routers.model_state import input_device

IGNORED: Final = -100  # a label that does not count
TRAINERS: Final = ("trl", "plain")
Batch: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How weights are tuned. The defaults are the paper's (appendix, "Training Implementation
    Details"); it does not say its learning rate, nor how gradients are clipped: as TRL does."""

    rank: int = 32
    alpha: int = 32
    learning_rates: tuple[float, ...] | None = None  # tried on the validation split. None: three
    extensions: int = 2  # rates tried beyond these, at the most, while the best is the outermost
    epochs: int = 3
    batch_size: int = 16
    weight_decay: float = 0.01
    clip: float = 1.0  # of the gradient's norm
    validation: float = 0.15  # share of the reference set
    seed: int | None = None  # None: the context's
    trainer: str | None = None  # "trl" or "plain". None: TRL where it is installed

    def __post_init__(self) -> None:
        for name in ("rank", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.validation < 1:
            raise ConfigError(f"validation must be between 0 and 1, got {self.validation}.")
        rates = self.learning_rates
        if rates is not None and (not rates or not all(0 < rate < math.inf for rate in rates)):
            raise ConfigError(f"learning_rates must be positive numbers, got {rates}.")
        if self.trainer not in (None, *TRAINERS):
            raise ConfigError(
                f"Unknown trainer {self.trainer!r}. Available: {', '.join(TRAINERS)}."
            )


class Window(NamedTuple):
    """Tokens to read, and each again where its loss counts, else IGNORED."""

    ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Split:
    """Windows to train on, and those that choose among what was trained."""

    train: list[Window]
    valid: list[Window]


def split_reference(context: TaskContext, share: float, seed: int) -> Split:
    """All windows of an example are on the same side: the rest of a text gives it away."""
    examples = reference_windows(context)
    if len(examples) < 2:
        raise ReferenceSetError(
            f"Fine-tuning needs 2 examples with an answer, one to validate; there are "
            f"{len(examples)}. Raise the limit of the reference set."
        )
    order = random.Random(seed).sample(range(len(examples)), len(examples))
    held = min(max(round(share * len(examples)), 1), len(examples) - 1)
    valid, train = order[:held], order[held:]
    return Split(
        [window for place in sorted(train) for window in examples[place]],
        [window for place in sorted(valid) for window in examples[place]],
    )


def reference_windows(context: TaskContext) -> list[list[Window]]:
    """By example, tokenised as a memory's are; the loss counts on completions, which a plain text
    is from its second token on. Windows and examples on which nothing counts are left out."""
    config = context.build_config(tokens="completion")
    tokens = reference_tokens(context.model, context.tokenizer, context.examples, config)
    made: dict[int, list[Window]] = {}
    owners = tokens.provenance.example_of_window.tolist()
    for owner, (start, size, *_) in zip(owners, tokens.bounds, strict=True):
        ids = tokens.provenance.stream[start : start + size]
        counts = tokens.scored[start : start + size - 1]
        if bool(counts.any()):
            labels = ids[1:].masked_fill(~counts, IGNORED).tolist()
            made.setdefault(owner, []).append(Window(ids.tolist(), [IGNORED, *labels]))
    return list(made.values())


def collate(windows: Sequence[Window]) -> Batch:
    """Padded on the right, under a mask. Shapes: input_ids, attention_mask, labels [B, T]."""
    longest = max(len(window.ids) for window in windows)
    ids = torch.zeros(len(windows), longest, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros_like(ids)
    for row, window in enumerate(windows):
        size = len(window.ids)
        ids[row, :size] = torch.tensor(window.ids)
        labels[row, :size] = torch.tensor(window.labels)
        mask[row, :size] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def balance_weight(model: nn.Module) -> float:
    """What the load-balancing loss weighs in training: as the model's config says."""
    config: Any = model.config
    return float(getattr(config.get_text_config(), "router_aux_loss_coef", 0.0) or 0.0)


def training_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean loss of the tokens that count, and the load-balancing loss of all but padding."""
    weight = balance_weight(model)
    output = _read(model, batch, output_router_logits=weight != 0)
    loss = _answer_losses(output, batch).mean()
    return loss + weight * output.aux_loss.to(loss.device) if weight else loss


@torch.no_grad()
def validation_loss(model: nn.Module, windows: Sequence[Window], batch_size: int) -> float:
    """Mean loss of the tokens that count; balancing does not."""
    total, count = 0.0, 0
    by_length = sorted(windows, key=lambda window: len(window.ids))
    for start in range(0, len(windows), batch_size):
        batch = collate(by_length[start : start + batch_size])
        losses = _answer_losses(_read(model, batch, output_router_logits=False), batch)
        total += float(losses.double().sum())
        count += len(losses)
    return total / count


def _read(model: nn.Module, batch: Batch, *, output_router_logits: bool) -> Any:
    device = input_device(model)
    ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
    # Asked for or not: by default a config decides, and not every model takes the word.
    wish = {"output_router_logits": output_router_logits} if balance_weight(model) else {}
    output: Any = model(input_ids=ids, attention_mask=mask, use_cache=False, **wish)
    return output


def _answer_losses(output: Any, batch: Batch) -> Tensor:
    """In fp32, of the tokens that count alone: logits are wide. Shape: [their number]."""
    targets = batch["labels"][:, 1:].to(output.logits.device)
    counts = targets != IGNORED
    return F.cross_entropy(output.logits[:, :-1][counts].float(), targets[counts], reduction="none")


class Change(Protocol):
    """What becomes of one parameter."""

    def onto(self, weight: Tensor) -> Tensor:
        """The parameter as it is to be: its shape, dtype and device."""


Changes: TypeAlias = Mapping[str, Change]  # by the parameter's name


@dataclass(frozen=True)
class Trainable:
    """A model some of whose parameters take gradients, and how what they became is taken down."""

    model: nn.Module
    changes: Callable[[], Changes]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


@dataclass
class Course:
    """One run of training, and what came of it."""

    trainable: Trainable
    split: Split
    rate: float
    config: TuneConfig
    seed: int
    on_step: Callable[[int], None]  # epoch, from 1
    losses: list[float] = field(default_factory=list)  # of each step, balancing included
    validation: list[float] = field(default_factory=list)  # after each epoch
    best: Changes | None = None

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.split.train) / self.config.batch_size)

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.config.epochs

    @property
    def best_loss(self) -> float:
        """Infinite where no epoch has a number."""
        return min(filter(math.isfinite, self.validation), default=math.inf)

    def order(self, epoch: int) -> list[int]:
        """Places of the training windows in an epoch, from 0."""
        count = len(self.split.train)
        return random.Random(f"{self.seed} {epoch}").sample(range(count), count)

    def optimiser(self) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """AdamW, whose rate falls in a line to nothing."""
        optimiser = MasterAdamW(
            self.trainable.parameters, lr=self.rate, weight_decay=self.config.weight_decay
        )
        return optimiser, LambdaLR(optimiser, lambda step: max(1 - step / self.steps, 0.0))

    def step_done(self, loss: float) -> None:
        self.losses.append(loss)
        self.on_step((len(self.losses) - 1) // self.steps_per_epoch + 1)

    def epoch_done(self) -> None:
        """Measure, and keep what is better than before."""
        self.trainable.model.eval()
        before = self.best_loss
        model, valid = self.trainable.model, self.split.valid
        self.validation.append(validation_loss(model, valid, self.config.batch_size))
        if self.best_loss < before:
            self.best = self.trainable.changes()


class MasterAdamW(torch.optim.AdamW):
    """AdamW on fp32 copies of weights in another dtype: small steps are not lost in rounding."""

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


def train_plainly(course: Course) -> None:
    """Without TRL: the same course, in a few lines."""
    model, train, size = course.trainable.model, course.split.train, course.config.batch_size
    optimiser, schedule = course.optimiser()
    for epoch in range(course.config.epochs):
        model.train()
        order = course.order(epoch)
        for start in range(0, len(order), size):
            loss = training_loss(
                model, collate([train[place] for place in order[start : start + size]])
            )
            loss.backward()
            nn.utils.clip_grad_norm_(course.trainable.parameters, course.config.clip)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            course.step_done(float(loss.detach()))
        course.epoch_done()


@contextmanager
def rebuilt(model: nn.Module) -> Iterator[None]:
    """Whatever is done to a model but to its weights is undone: wrapped modules, hooks (those of
    transformers that record router logits stay on otherwise), methods and configs."""
    modules = [(module, type(module), _contents(module)) for module in model.modules()]
    holder: Any = model
    parts = (holder.config, holder.config.get_text_config(), holder.generation_config)
    configs = [(part, copy.deepcopy(vars(part))) for part in parts if part is not None]
    try:
        yield
    finally:
        for module, kind, contents in modules:
            module.__class__ = kind
            attributes = vars(module)
            attributes.clear()
            for name, (value, items) in contents.items():
                attributes[name] = value
                if items is not None:  # the very dict: handles of hooks refer to it
                    value.clear()
                    value.update(items)
        for part, settings in configs:
            vars(part).clear()
            vars(part).update(settings)


def _contents(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Attributes, and what is in those that are dicts: children, parameters, hooks."""
    return {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(module).items()
    }
