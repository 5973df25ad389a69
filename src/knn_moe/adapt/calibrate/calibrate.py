"""Calibrate a memory on its own reference set: choose neighbours, widths and values.

On one part of the examples it is chosen how far values start from the router's own logits
(start.py), widths are fitted (fit.py), and values are trained at several rates (values.py). By a
second part the best of these trials is chosen. On a third part, which nothing was fitted or chosen
by, it is judged against the model alone. If it is better there, but not surely, the same is learned
twice more, each time without one half of the examples to fit on, and these halves judge it as
well. If the memory is not surely better, calibration turns it off: every confidence
factor becomes 0.

The first token of each sequence is always left to the router. A pretrained model keeps a huge
activation there, on which attention rests where it has nothing to attend to; a few experts of one
layer make it ("super experts"). A first token that misses one of them ruins all tokens after it,
and no gradient shows this before it happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from knn_moe.adapt.calibrate.result import Calibration
from knn_moe.adapt.calibrate.search import Search, no_finite_loss
from knn_moe.adapt.calibrate.trials import Calibrator
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.build.build import choice_tokens
from knn_moe.config import BuildConfig, CalibrationConfig
from knn_moe.errors import CalibrationError, ConfigError
from knn_moe.inference.arguments import MemoryLike, check_model, open_memory
from knn_moe.inference.attach import check_belongs
from knn_moe.inference.handle import check_free
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.load import Examples, iter_examples
from knn_moe.reference.provenance import owners
from knn_moe.reference.windows import ReferenceTokens
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import (
    explain_out_of_memory,
    forget_compiled_graphs,
    uncompiled,
)
from knn_moe.support.progress import OnProgress, ignore_progress


def calibrate(
    model: nn.Module,
    memory: MemoryLike,
    examples: Examples | None = None,
    config: CalibrationConfig | None = None,
    *,
    tokenizer: Any = None,
    force: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> Calibration:
    """Find how `memory` is best used on `model`, and how much it gains. Neither is changed.

    Of the memory's routing, layers and index are kept; the similarity becomes RBF, and first tokens
    are left to the router. Searches are exact.

    Args:
        model: The model that the memory was built for.
        memory: A memory with keys, or the folder or hub id of one.
        examples: The reference set the memory was built from, or others of its kind. None: the
            memory's own tokens. Never give test data: what is reported would be what was fitted.
        config: How to calibrate.
        tokenizer: Reads `examples`.
        force: As in `attach`.
        on_progress: Called after each step of a fit.

    Returns:
        What was found; `apply(memory)` puts it into the memory.

    Raises:
        AttachError: `model` is no model, or has a memory attached.
        CalibrationError: There are too few examples, or they had a part in making the memory.
        MemoryMismatchError: The memory belongs to another model.
        ModelTooLargeError: It does not fit in memory.
    """
    started = time.monotonic()
    check_model(model)
    memory, config = open_memory(memory), config or CalibrationConfig()
    model = uncompiled(model)
    if memory.manifest.random_seed is not None:
        raise CalibrationError(
            "This memory is a control that recalls cases at random. Calibrate the memory it was "
            "made from."
        )
    memory.full_layers()  # refuses a memory without keys
    check_free(model)
    if not force:
        check_belongs(model, memory)
    reference = read_reference(model, memory, examples, tokenizer, memory.build)
    _check_unseen(memory, reference)
    with learning_on(model, out_of_memory_advice(memory, config)):
        calibrator = Calibrator(model, memory, reference, config, on_progress)
        search = Search(calibrator)
        search.run()
        return conclude(search, started)


@contextmanager
def learning_on(model: nn.Module, advice: str) -> Iterator[None]:
    """Allow gradients, use experts that are fast with them, and give advice if it does not fit."""
    forget_compiled_graphs()
    with torch.inference_mode(False), use_grouped_experts(model), explain_out_of_memory(advice):
        yield


def conclude(search: Search, started: float) -> Calibration:
    """Judge the best trial, choose a head, train on all examples, and return what was found."""
    calibrator, best = search.calibrator, search.best
    try:
        judged = calibrator.judge(best)
    except DivergedError:
        raise no_finite_loss() from None
    if not judged.better and judged.change.difference < 0:
        with suppress(DivergedError):  # what was judged first remains, and is not sure
            judged = calibrator.judge_again(best)
    # A head predicts the next token, which does not tell the right answer from a wrong one.
    wanted = calibrator.config.head and not calibrator.by_choices
    head = calibrator.choose_head(best, routed=judged.better) if wanted else None
    last = calibrator.train_on_all(best) if judged.better else best.turned_off()
    if head and head.helps and last.routing is not best.routing:
        head = calibrator.read_head_keys(head, last)
    return Calibration(
        routing=replace(last.routing, head=head.config if head and head.helps else None),
        judgement=judged,
        by_choices=calibrator.by_choices,
        trials=tuple(search.summaries),
        chosen=best.name,
        distances=calibrator.distances(best.routing.k),
        values=last.values,
        update_scale=last.update_scale,
        values_trained=last.training is not None,
        start=calibrator.start.losses if calibrator.config.value_rates else {},
        head=head,
        seconds=time.monotonic() - started,
        seconds_by_part=calibrator.clock.seconds,
    )


def read_reference(
    model: nn.Module,
    memory: RoutingMemory,
    examples: Examples | None,
    tokenizer: Any,
    build: BuildConfig,
) -> ReferenceTokens:
    """Return the tokens to learn from: of the examples as `build` reads them, or the memory's own.

    Raises:
        CalibrationError: The memory does not say where the completions begin that it was built for.
        ConfigError: There is no tokenizer to read the examples.
    """
    if examples is None:
        if memory.build.tokens == "all" and memory.build.loss == "completion":
            raise CalibrationError(
                f"{memory!r} was built for its completions, and does not say where they begin. "
                f"Give its examples."
            )
        return memory.reference_tokens()
    if tokenizer is None:
        raise ConfigError("The tokenizer is needed to read examples: pass tokenizer=….")
    return choice_tokens(model, tokenizer, list(iter_examples(examples)), build)


def _check_unseen(memory: RoutingMemory, reference: ReferenceTokens) -> None:
    """Raise CalibrationError if examples had a part in choosing the memory's cases or values."""
    if memory.manifest.examples_can_judge:
        return
    if torch.isin(reference.owners, owners(memory.provenance)).any():
        how = "was pruned by what its own examples gained from it"
        if memory.manifest.values_trained:
            how = "has values that were trained on its own examples"
        raise CalibrationError(
            f"{memory!r} {how}, so they cannot judge it. Calibrate the memory as it was built (or "
            f"pruned by chance), or give other examples."
        )


def out_of_memory_advice(memory: RoutingMemory, config: CalibrationConfig) -> str:
    """Say what calibration needs, and what takes less."""
    return (
        f"Calibration needs the whole memory ({memory.nbytes / 1e9:,.1f} GB), seven times its "
        f"values to train them, and a backward pass of {config.step_tokens:,} tokens beside the "
        f"model, and they did not fit. Keep the values as they are (--keep-values, "
        f"value_rates=()), try fewer neighbours (-k), lower step_tokens, or calibrate a memory of "
        f"fewer examples."
    )
