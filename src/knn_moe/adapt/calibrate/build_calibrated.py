"""Build a memory that chooses its own settings: which tokens, then how their cases are used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from knn_moe.adapt.calibrate.calibrate import calibrating, conclude
from knn_moe.adapt.calibrate.clock import Clock
from knn_moe.adapt.calibrate.result import Calibration, TokenChoice, write_calibrated
from knn_moe.adapt.calibrate.search import Search, no_finite_loss
from knn_moe.adapt.calibrate.trials import Calibrator
from knn_moe.build.build import build_memory, reference_tokens
from knn_moe.build.optimise import optimise_routing
from knn_moe.config import PRESETS, BuildConfig, CalibrationConfig
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
from knn_moe.routers.own_logits import compute_own_logits
from knn_moe.support.progress import OnProgress, ignore_progress

PAPER_STEP: Final = PRESETS["paper"]["build"]["learning_rate"]


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
    built in `folder`; where there are tokens to choose among, it leaves nothing.

    Args:
        model: A Hugging Face MoE model.
        tokenizer: Its tokenizer.
        examples: A file, or any iterable of examples; see `load_examples`.
        config: What is not chosen: windows and batches, and tokens if not all. How to build, too,
            where values are to stay (`CalibrationConfig(value_rates=())`).
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
    started, clock = time.monotonic(), Clock()
    calibration = calibration or CalibrationConfig()
    model = uncompiled(model)
    if folder is not None:
        refuse_existing(Path(folder), overwrite=False)
    check_free(model)
    listed, config = list(iter_examples(examples)), config or BuildConfig()
    judged = reference_tokens(model, tokenizer, listed, replace(config, loss="completion"))
    split(judged, calibration)  # refuses too few examples before anything is built
    if calibration.value_rates:
        config = replace(config, steps=1, learning_rate=1.0, gradient=_find_gradient(model, judged))
    choices = _list_choices(config, judged)

    def begin(choice: BuildConfig) -> Search:
        with clock.measure("built"):
            memory = build_memory(
                model,
                tokenizer,
                listed,
                choice,
                folder=folder if len(choices) == 1 else None,
                on_progress=on_progress,
            )
        completions = (choice.loss or choice.tokens) == "completion"
        reference = judged if completions else memory.reference_tokens()
        with calibrating(model, memory, calibration):
            search = Search(Calibrator(model, memory, reference, calibration, on_progress, judged))
            search.begin()
        return search

    search, tried = _choose_tokens(choices, begin)
    memory = search.calibrator.memory
    with calibrating(model, memory, calibration):
        search.run()
        found = conclude(search, started)
        if calibration.value_rates and not found.helps:
            memory = _shorten(model, memory)
    seconds = {**clock.seconds, **found.seconds_by_part}
    found = replace(found, token_choices=tried, seconds_by_part=seconds)
    return _write(found.apply(memory), memory, folder), found


def _choose_tokens(
    choices: Sequence[BuildConfig], begin: Callable[[BuildConfig], Search]
) -> tuple[Search, tuple[TokenChoice, ...]]:
    """Begin with each choice of tokens; return the best search, and all choices, best first.

    Only the best search is kept: each holds a memory.
    """
    best: Search | None = None
    tried: list[TokenChoice] = []
    for choice in choices:
        search = begin(choice)
        if search.has_trial or len(choices) == 1:
            loss = search.best.judgement.loss
            tried.append(TokenChoice(choice.tokens, choice.loss or choice.tokens, loss))
            if best is None or loss < best.best.judgement.loss:
                best = search
        del search
    if best is None:
        raise no_finite_loss()
    return best, tuple(sorted(tried, key=lambda each: each.loss)) if len(choices) > 1 else ()


def _shorten(model: nn.Module, memory: RoutingMemory) -> RoutingMemory:
    """Give a memory that is turned off the paper's small step: it may be used after a merge."""
    layers = memory.full_layers()
    for router in find_routers(model):
        if router.layer in layers:
            layer = layers[router.layer]
            own = compute_own_logits(router, layer.keys)
            values = own + PAPER_STEP / memory.build.learning_rate * (layer.values - own)
            layers[router.layer] = replace(layer, values=values)
    build = replace(memory.build, learning_rate=PAPER_STEP)
    manifest = replace(memory.manifest, build=build)
    return replace(memory, layers=layers, manifest=manifest, folder=None)


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
    calibrated.save_pretrained(folder, overwrite=True)  # what was built there, if anything
    return RoutingMemory.from_pretrained(folder, verify=False)
