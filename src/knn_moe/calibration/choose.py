"""Choose how a memory is used, on its own reference set: neighbours, kernels, layers.

On one part of the examples the kernels of every layer are fitted by gradient, for each number of
neighbours; on others, that nothing was fitted on, the result is judged against the model alone. A
memory that is not significantly better there is told to keep silent (trust 0).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from knn_moe.batches import ReferenceTokens
from knn_moe.build import reference_tokens
from knn_moe.calibration.fit import Cases, find_neighbours, fit_kernels
from knn_moe.calibration.judge import Judgement, judge
from knn_moe.calibration.slices import own_reference, split
from knn_moe.config import RoutingConfig
from knn_moe.errors import CalibrationError, ConfigError, ModelTooLargeError
from knn_moe.handle import check_belongs
from knn_moe.intercept import forget_compiled_graphs, hook_on
from knn_moe.memory import RoutingMemory
from knn_moe.provenance import owners
from knn_moe.reference import ExampleLike, iter_examples
from knn_moe.routers import find_routers

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """How a memory is calibrated."""

    neighbours: tuple[int, ...] = (4, 16)  # K to choose among
    held_out: float = 0.3  # of the examples, to judge by
    most_tokens: int = 16384  # read of each part
    steps: int = 96  # of the fit, for each K
    step_tokens: int = 2048  # that one of them reads
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.neighbours or min(self.neighbours) < 1:
            raise ConfigError(f"neighbours must be numbers from 1 on, got {self.neighbours}.")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"held_out must be between 0 and 1, got {self.held_out}.")
        for name in ("most_tokens", "steps", "step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Calibration:
    """What was chosen, and what it is worth on examples that had no part in the choice."""

    routing: RoutingConfig
    judgement: Judgement
    fitted: dict[int, float]  # loss a token on the fitted examples, by K
    seconds: float

    @property
    def helps(self) -> bool:
        """Whether the memory was better than the model alone, beyond chance."""
        return self.judgement.better

    def report(self) -> dict[str, Any]:
        """What it is worth and how that was found, for a memory's config."""
        judged = asdict(self.judgement)
        by_layer = judged.pop("mean_confidence")
        return {
            "helps": self.helps,
            **judged,
            "mean_confidence": {str(layer): value for layer, value in by_layer.items()},
            "loss_by_neighbours": {str(k): loss for k, loss in self.fitted.items()},
            "seconds": round(self.seconds, 1),
        }


def calibrate(
    model: nn.Module,
    memory: RoutingMemory,
    examples: Iterable[ExampleLike] | None = None,
    config: CalibrationConfig | None = None,
    *,
    tokenizer: Any = None,
    force: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Calibration:
    """How `memory` is best used on `model`, and what it is worth; neither is changed.

    `examples` are the reference set the memory was built from, or others of its kind, read with
    `tokenizer`; left out, the memory's own tokens are read. Never give test data: what is
    reported would be what was fitted. Of the memory's routing, layers and index are kept; the
    similarity becomes RBF, and a gate is left out. Fitted and judged by exact search. `force`: as
    in `attach`, for a memory of another model of the same shape.
    """
    started = time.monotonic()
    config = config or CalibrationConfig()
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper would trace our hooks
    if not force:
        check_belongs(model, memory)
    reference = _reference(model, memory, examples, tokenizer)
    fitting, judging = split(reference, config.held_out, config.most_tokens, config.seed)
    counts = _counts(memory, config)
    fit_on = list(fitting.readings(min(config.step_tokens, memory.build.batch_tokens)))
    judge_on = list(judging.readings(memory.build.batch_tokens))
    progress = _Progress(on_progress, 1 + len(counts) * config.steps + len(judge_on))
    forget_compiled_graphs()
    with _fitting_in(memory):
        cases = _cases(model, memory)
        neighbours = find_neighbours(model, cases, fit_on, counts[-1])
        progress.step("searching")
        found = {}
        for k in counts:
            on_step = progress.on(f"fitting K = {k}")
            found[k] = fit_kernels(model, cases, fit_on, neighbours, k, config.steps, on_step)
        best = min(found, key=lambda k: found[k][1])
        kept = memory.routing
        chosen = RoutingConfig(
            k=best, kernels=found[best][0], layers=kept.layers, index=kept.index, stats=kept.stats
        )
        judged = judge(model, cases, judge_on, chosen, progress.on("judging"))
    if not judged.better:
        silent = tuple(replace(kernel, trust=0.0) for kernel in chosen.kernels)
        chosen = replace(chosen, kernels=silent)
    fitted = {k: loss for k, (_, loss) in found.items()}
    return Calibration(chosen, judged, fitted, time.monotonic() - started)


def _reference(
    model: nn.Module, memory: RoutingMemory, examples: Iterable[ExampleLike] | None, tokenizer: Any
) -> ReferenceTokens:
    if examples is None and memory.header.pruned is not None:
        raise CalibrationError(
            f"{memory!r} was pruned by what its own examples gained from it, so they cannot judge "
            f"it. Calibrate the whole memory and prune that, or give other examples."
        )
    if examples is None:
        return own_reference(memory)
    if tokenizer is None:
        raise ConfigError("calibrate reads examples with their tokenizer: pass tokenizer=….")
    return reference_tokens(model, tokenizer, iter_examples(examples), memory.build)


def _counts(memory: RoutingMemory, config: CalibrationConfig) -> list[int]:
    """Numbers of neighbours that every example has: of all cases but its own."""
    sizes = owners(memory.provenance)[memory.provenance.window].unique(return_counts=True)[1]
    most = len(memory) - int(sizes.max()) if len(sizes) else 0
    if most < 1:
        raise CalibrationError(
            f"{memory!r} cannot be calibrated: its examples have no others to recall."
        )
    return sorted({min(k, most) for k in config.neighbours})


def _cases(model: nn.Module, memory: RoutingMemory) -> list[Cases]:
    """Of each layer that the memory's routing has, on its router's device."""
    layers = memory.full_layers()
    wanted = layers if memory.routing.layers is None else memory.routing.layers
    routers = [router for router in find_routers(model) if router.layer in wanted]
    for router in routers:
        if hook_on(router) is not None:
            raise CalibrationError(
                f"The model has a memory attached (at {router.name!r}): detach it to calibrate one."
            )
    owner = owners(memory.provenance)[memory.provenance.window]
    return [Cases.of(router, layers[router.layer], owner) for router in routers]


@contextmanager
def _fitting_in(memory: RoutingMemory) -> Iterator[None]:
    """Running out of memory, said in words."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ModelTooLargeError(
            f"Calibrating takes the whole memory ({memory.nbytes / 1e9:,.1f} GB) and a backward "
            f"pass of {CalibrationConfig.step_tokens:,} tokens beside the model, and they did not "
            f"fit. Lower step_tokens, or calibrate a memory of fewer examples."
        ) from None


class _Progress:
    def __init__(self, send: OnProgress, total: int) -> None:
        self.send = send
        self.total = total
        self.done = 0

    def step(self, what: str) -> None:
        self.done += 1
        self.send(what, self.done, self.total)

    def on(self, what: str) -> Callable[[], None]:
        return lambda: self.step(what)
