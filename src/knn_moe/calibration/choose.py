"""Choose how a memory is used, on its own reference set: neighbours, kernels, values, layers.

On one part of the examples the kernels of every layer are fitted by gradient, for each number of
neighbours, and then the values; by a second part the best of these is chosen; on a third, that
had no part in either, it is judged against the model alone. A memory that is not significantly
better there is told to keep silent (trust 0).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from knn_moe.batches import ReferenceTokens
from knn_moe.build import reference_tokens
from knn_moe.calibration.result import Calibration
from knn_moe.calibration.settings import CalibrationConfig
from knn_moe.calibration.slices import own_reference
from knn_moe.calibration.trials import OnProgress, Trial, Workbench
from knn_moe.errors import CalibrationError, ConfigError, ModelTooLargeError
from knn_moe.experts import fast_experts
from knn_moe.handle import check_belongs
from knn_moe.intercept import forget_compiled_graphs
from knn_moe.memory import RoutingMemory
from knn_moe.reference import ExampleLike, iter_examples


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
    forget_compiled_graphs()
    with torch.inference_mode(False), fast_experts(model), _fitting_in(memory, config):
        bench = Workbench(model, memory, reference, config, on_progress)
        fitted = [bench.fit_kernels(k) for k in bench.counts]
        learned = [bench.learn_values(_best(fitted), rate) for rate in config.value_rates]
        trials = [*bench.usual(), *fitted, *learned]
        best = _best(trials)
        judged = bench.judge(best)
        last = bench.learn_from_all(best) if judged.better else best.silenced()
    return Calibration(
        routing=last.routing,
        judgement=judged,
        trials=tuple(trial.outcome() for trial in trials),
        chosen=best.name,
        distances=bench.distances(),
        values=last.values,
        seconds=time.monotonic() - started,
    )


def _best(trials: Iterable[Trial]) -> Trial:
    return min(trials, key=lambda trial: trial.judgement.loss)


def _reference(
    model: nn.Module, memory: RoutingMemory, examples: Iterable[ExampleLike] | None, tokenizer: Any
) -> ReferenceTokens:
    if examples is None and memory.header.pruned is not None:
        raise CalibrationError(
            f"{memory!r} was pruned by what its own examples gained from it, so they cannot judge "
            f"it. Calibrate the whole memory and prune that, or give other examples."
        )
    if examples is None and memory.header.learned:
        raise CalibrationError(
            f"The values of {memory!r} were learned from its own examples, so they cannot judge "
            f"it. Calibrate the memory as it was built, or give other examples."
        )
    if examples is None:
        return own_reference(memory)
    if tokenizer is None:
        raise ConfigError("calibrate reads examples with their tokenizer: pass tokenizer=….")
    return reference_tokens(model, tokenizer, iter_examples(examples), memory.build)


@contextmanager
def _fitting_in(memory: RoutingMemory, config: CalibrationConfig) -> Iterator[None]:
    """Running out of memory, said in words."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ModelTooLargeError(
            f"Calibrating takes the whole memory ({memory.nbytes / 1e9:,.1f} GB) and a backward "
            f"pass of {config.step_tokens:,} tokens beside the model, and they did not fit. Lower "
            f"step_tokens, or calibrate a memory of fewer examples."
        ) from None
