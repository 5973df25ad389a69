"""Distil a memory: learn a few prototypes a layer that do what all of its cases do.

The keys of the prototypes start where the memory's keys are dense, and their updates at 0. On one
part of the reference set they are trained, at several rates; by a second part the rate and the
number of passes are chosen, and layers that do not help are turned off; on a third part the result
is judged against the model alone, and turned off if it is not surely better. What is kept is
trained on all examples.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from knn_moe.adapt.calibrate.build_calibrated import find_gradient
from knn_moe.adapt.calibrate.calibrate import learning_on, read_reference
from knn_moe.adapt.calibrate.result import TrialSummary
from knn_moe.adapt.calibrate.search import climb
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.adapt.distil.result import Distillation
from knn_moe.adapt.distil.trials import Distiller, Trial
from knn_moe.build.build import build_memory, choice_tokens
from knn_moe.config import BuildConfig, DistilConfig
from knn_moe.errors import CalibrationError
from knn_moe.inference.arguments import MemoryLike, check_model, open_memory
from knn_moe.inference.attach import check_belongs
from knn_moe.inference.handle import check_free
from knn_moe.memory.files import refuse_existing
from knn_moe.memory.manifest import BY_CHANCE
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.load import Examples, iter_examples
from knn_moe.reference.provenance import owners
from knn_moe.reference.splits import split
from knn_moe.reference.windows import ReferenceTokens
from knn_moe.routers.model_state import uncompiled
from knn_moe.support.progress import OnProgress, ignore_progress


def distil(
    model: nn.Module,
    memory: MemoryLike,
    examples: Examples | None = None,
    config: DistilConfig | None = None,
    *,
    tokenizer: Any = None,
    force: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> Distillation:
    """Learn prototypes that stand for the cases of `memory`. Neither is changed.

    Only the memory's keys are used, so it need not be calibrated. Examples with a prompt are
    learned by their completions, and examples with distractors by the choice among all
    completions, as in a calibration.

    Args:
        model: The model that the memory was built for.
        memory: A memory with keys, or the folder or hub id of one.
        examples: The reference set the memory was built from, or others of its kind. None: the
            memory's own tokens, without regard to where completions begin. Never give test data:
            what is reported would be what was learned.
        config: How many prototypes, and how they are learned.
        tokenizer: Reads `examples`.
        force: As in `attach`.
        on_progress: Called after each step.

    Returns:
        What was learned; `apply(memory)` makes a memory of it.

    Raises:
        AttachError: `model` is no model, or has a memory attached.
        CalibrationError: There are too few examples.
        MemoryFormatError: The memory has no keys.
        MemoryMismatchError: The memory belongs to another model.
        ModelTooLargeError: It does not fit in memory.
    """
    started = time.monotonic()
    check_model(model)
    memory, config = open_memory(memory), config or DistilConfig()
    model = uncompiled(model)
    if not len(memory):
        raise CalibrationError(f"{memory!r} has nothing to distil.")
    memory.full_layers()  # refuses a memory without keys
    check_free(model)
    if not force:
        check_belongs(model, memory)
    learned = replace(memory.build, loss="completion")
    reference = read_reference(model, memory, examples, tokenizer, learned)
    _check_pruned(memory, reference)
    with learning_on(model, _advice(memory, config)):
        gradient = find_gradient(model, reference)
        distiller = Distiller(model, memory, reference, config, gradient, on_progress)
        return _search(distiller, started)


def build_distilled(
    model: nn.Module,
    tokenizer: Any,
    examples: Examples,
    config: BuildConfig | None = None,
    distillation: DistilConfig | None = None,
    *,
    folder: str | Path | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> tuple[RoutingMemory, Distillation]:
    """Build a memory and distil it. The memory it was distilled from is not kept.

    Args:
        model: A Hugging Face MoE model.
        tokenizer: Its tokenizer.
        examples: All that `load_examples` takes.
        config: Windows and batches.
        distillation: How to distil.
        folder: Where the distilled memory is written. None: it lies in working memory.
        overwrite: Replace a memory that is in `folder`.
        on_progress: Called after each step of all stages.

    Returns:
        The distilled memory, and what was found.

    Raises:
        AttachError, BuildError, CalibrationError, ReferenceSetError, ModelTooLargeError: As in
            `build_memory` and `distil`.
    """
    if folder is not None:
        refuse_existing(Path(folder), overwrite=overwrite)
    listed, config = list(iter_examples(examples)), config or BuildConfig()
    distillation = distillation or DistilConfig()
    learned = choice_tokens(model, tokenizer, listed, replace(config, loss="completion"))
    split(learned, distillation)  # too few examples are refused now
    # Prototypes learn by themselves which way to go: the cases need no direction.
    config = replace(config, steps=0)
    whole = build_memory(model, tokenizer, listed, config, on_progress=on_progress)
    found = distil(model, whole, listed, distillation, tokenizer=tokenizer, on_progress=on_progress)
    small = found.apply(whole)
    if folder is None:
        return small, found
    small.save_pretrained(folder, overwrite=overwrite)
    return RoutingMemory.from_pretrained(folder, verify=False), found


def _search(distiller: Distiller, started: float) -> Distillation:
    """Try rates, judge the best trial, and train it on all examples."""
    found: dict[float, Trial] = {}
    summaries: list[TrialSummary] = []

    def loss_at(rate: float) -> float:
        trial = distiller.try_rate(rate)
        if trial is None:
            return float("inf")
        found[rate] = trial
        summaries.append(trial.summary())
        return trial.judgement.loss

    climb(sorted(distiller.config.rates), loss_at)
    if not found:
        raise _no_finite_loss()
    best = min(found.values(), key=lambda trial: trial.judgement.loss)
    try:
        best = distiller.turn_off_layers(best)
        judged = distiller.judge_unseen(best)
    except DivergedError:
        raise _no_finite_loss() from None
    off = replace(best, off=frozenset(best.layers))
    last = distiller.train_on_all(best) if judged.better else off
    return Distillation(
        layers=distiller.name_cases(last),
        routing=last.routing(distiller.memory),
        judgement=judged,
        by_choices=distiller.by_choices,
        trials=tuple(summaries),
        chosen=best.name,
        seconds=time.monotonic() - started,
        seconds_by_part=distiller.clock.seconds,
    )


def _no_finite_loss() -> CalibrationError:
    return CalibrationError(
        "No prototypes gave the model a finite loss: they or the model may overflow. Try smaller "
        "rates (--rate), or another dtype."
    )


def _check_pruned(memory: RoutingMemory, reference: ReferenceTokens) -> None:
    """Raise CalibrationError if examples that are to judge chose the memory's cases."""
    pruned = memory.manifest.pruned
    if pruned is None or pruned["score"] == BY_CHANCE:
        return
    if torch.isin(reference.owners, owners(memory.provenance)).any():
        raise CalibrationError(
            f"{memory!r} was pruned by what its own examples gained from it, so they cannot judge "
            f"what is distilled from it. Distil the memory as it was built, or give other examples."
        )


def _advice(memory: RoutingMemory, config: DistilConfig) -> str:
    return (
        f"Distilling needs {config.prototypes:,} prototypes for each of {len(memory.layers)} "
        f"layers four times, and a backward pass of {config.step_tokens:,} tokens beside the "
        f"model, and they did not fit. Try fewer prototypes (--prototypes), or lower step_tokens."
    )
