"""Build a memory that chooses its own settings: which tokens, then how their cases are used."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from knn_moe.adapt.calibrate.calibrate import calibrating, conclude
from knn_moe.adapt.calibrate.clock import Clock
from knn_moe.adapt.calibrate.result import Calibration, TokenChoice, write_calibrated
from knn_moe.adapt.calibrate.search import Search
from knn_moe.adapt.calibrate.trials import Calibrator
from knn_moe.build.build import build_memory, reference_tokens
from knn_moe.build.optimise import optimise_routing
from knn_moe.config import BuildConfig, CalibrationConfig
from knn_moe.errors import UnsupportedModelError
from knn_moe.inference.attach import check_free
from knn_moe.memory.files import refuse_existing
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.examples import ExampleLike, iter_examples
from knn_moe.reference.splits import split
from knn_moe.reference.windows import ReferenceTokens, make_batch
from knn_moe.routers.find import find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import freeze, input_device, uncompiled
from knn_moe.support.progress import OnProgress, ignore_progress


def build_calibrated(
    model: nn.Module,
    tokenizer: Any,
    examples: str | Path | Iterable[ExampleLike],
    config: BuildConfig | None = None,
    calibration: CalibrationConfig | None = None,
    *,
    folder: str | Path | None = None,
    on_progress: OnProgress = ignore_progress,
) -> tuple[RoutingMemory, Calibration]:
    """Build a memory as `build_memory` does, with values, widths and K chosen by `examples`.

    One gradient step gives each case a direction; how far to go is calibrated. Examples with a
    prompt are judged by their completions, and it is chosen which tokens become cases and whose
    loss is lowered, unless `config` says so. A kill during calibration leaves the memory as it was
    built in `folder`, where there was nothing to choose among.

    Args:
        model: A Hugging Face MoE model.
        tokenizer: Its tokenizer.
        examples: A file, or any iterable of examples; see `load_examples`.
        config: What is not chosen: windows and batches, and tokens if not all.
        calibration: How to calibrate.
        folder: As in `build_memory`.
        on_progress: Called after each step of all stages.

    Returns:
        The memory, and what the calibration found.

    Raises:
        AttachError: The model has a memory attached.
        CalibrationError: There are too few examples.
        BuildError, ReferenceSetError, ModelTooLargeError: As in `build_memory`.
    """
    started = time.monotonic()
    calibration = calibration or CalibrationConfig()
    model = uncompiled(model)
    if folder is not None:
        refuse_existing(Path(folder), overwrite=False)
    check_free(model)
    listed, config = list(iter_examples(examples)), config or BuildConfig()
    judged = reference_tokens(model, tokenizer, listed, replace(config, loss="completion"))
    split(judged, calibration)  # refuses too few examples before anything is built
    config = replace(config, steps=1, learning_rate=1.0, gradient=_find_gradient(model, judged))
    choices = _list_choices(config, judged)
    best: Search | None = None
    tried: list[TokenChoice] = []
    clock = Clock()
    for choice in choices:
        alone = folder if len(choices) == 1 else None
        with clock.measure("built"):
            memory = build_memory(
                model, tokenizer, listed, choice, folder=alone, on_progress=on_progress
            )
        reference = reference_tokens(model, tokenizer, listed, choice)
        with calibrating(model, memory, calibration):
            search = Search(Calibrator(model, memory, reference, calibration, on_progress, judged))
            search.begin()
        loss = search.best.judgement.loss
        tried.append(TokenChoice(choice.tokens, choice.loss or choice.tokens, loss))
        if best is None or loss < best.best.judgement.loss:
            best = search  # the others' cases are dropped
    assert best is not None
    memory = best.calibrator.memory
    with calibrating(model, memory, calibration):
        best.run()
        found = conclude(best, started)
    tried.sort(key=lambda each: each.loss)
    found = replace(
        found,
        token_choices=tuple(tried) if len(tried) > 1 else (),
        seconds_by_part={**clock.seconds, **found.seconds_by_part},
    )
    return _write(found.apply(memory), memory, folder), found


def _find_gradient(model: nn.Module, reference: ReferenceTokens) -> str:
    """Return "dense", or "sparse" where the experts of the model cannot all be run."""
    shortest = int(reference.lengths.argmin())
    config = BuildConfig(steps=1, gradient="dense")
    batch = make_batch(reference, [shortest])
    try:
        with freeze(model), use_grouped_experts(model):
            optimise_routing(model, find_routers(model), batch.to(input_device(model)), config)
    except UnsupportedModelError:
        return "sparse"
    return "dense"


def _list_choices(config: BuildConfig, judged: ReferenceTokens) -> list[BuildConfig]:
    """Return the choices of tokens to compare: one where there are no prompts, or it was made."""
    given = config.tokens != "all" or config.loss is not None
    if given or int(judged.scored.sum()) == len(judged.scored) - len(judged.lengths):
        return [config]
    return [
        replace(config, tokens=tokens, loss=loss)
        for tokens, loss in (
            ("all", "completion"),
            ("all", "all"),
            ("completion", "completion"),
        )
    ]


def _write(
    calibrated: RoutingMemory, built: RoutingMemory, folder: str | Path | None
) -> RoutingMemory:
    if folder is None:
        return calibrated
    if built.folder is not None and built.folder.resolve() == Path(folder).resolve():
        return write_calibrated(calibrated, Path(folder))
    calibrated.save_pretrained(folder)
    return RoutingMemory.from_pretrained(folder, verify=False)
