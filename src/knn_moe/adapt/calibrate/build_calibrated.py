"""Build a memory that chooses its own settings: which tokens, then how their cases are used."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from knn_moe.adapt.calibrate.calibrate import conclude, learning_on, out_of_memory_advice
from knn_moe.adapt.calibrate.clock import Clock
from knn_moe.adapt.calibrate.result import Calibration, TokenChoice
from knn_moe.adapt.calibrate.search import Search, no_finite_loss
from knn_moe.adapt.calibrate.trials import Calibrator
from knn_moe.build.build import Destination, build_memory, build_to, choice_tokens
from knn_moe.build.checkpoint import digest_reference
from knn_moe.build.optimise import optimise_routing
from knn_moe.build.workspace import Workspace, partial_folder
from knn_moe.config import PRESETS, BuildConfig, CalibrationConfig, as_json
from knn_moe.errors import UnsupportedModelError
from knn_moe.inference.handle import check_free
from knn_moe.memory.files import refuse_existing
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.choices import ChoiceTokens
from knn_moe.reference.load import Examples, iter_examples
from knn_moe.reference.splits import split
from knn_moe.reference.windows import ReferenceTokens, make_batch
from knn_moe.routers.find import find_routers
from knn_moe.routers.fingerprint import identify
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import freeze, input_device, uncompiled
from knn_moe.routers.own_logits import compute_own_logits
from knn_moe.support.progress import OnProgress, ignore_progress

PAPER_STEP: Final = PRESETS["paper"]["build"]["learning_rate"]


def build_calibrated(
    model: nn.Module,
    tokenizer: Any,
    examples: Examples,
    config: BuildConfig | None = None,
    calibration: CalibrationConfig | None = None,
    *,
    folder: str | Path | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> tuple[RoutingMemory, Calibration]:
    """Build a memory as `build_memory` does, with values, widths and K chosen by `examples`.

    One gradient step gives each case a direction; how far to go is calibrated. Examples with a
    prompt are judged by their completions, and it is chosen which tokens become cases and whose
    loss is lowered, unless `config` says so. Examples with distractors are judged, and their values
    are trained, by the choice among all completions (objective.py). After a kill, what was built is
    found when the same job is started again; the calibration itself starts again.

    Args:
        model: A Hugging Face MoE model.
        tokenizer: Its tokenizer.
        examples: A file, a folder, a table or a list of examples: all that `load_examples` takes.
        config: What is not chosen: windows and batches, and tokens if not all. How to build, too,
            where values are to stay (`CalibrationConfig(value_rates=())`).
        calibration: How to calibrate.
        folder: As in `build_memory`.
        overwrite: As in `build_memory`.
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
    if folder is not None and not partial_folder(Path(folder)).exists():
        refuse_existing(Path(folder), overwrite=overwrite)
    check_free(model)
    listed, config = list(iter_examples(examples)), config or BuildConfig()
    judged = choice_tokens(model, tokenizer, listed, replace(config, loss="completion"))
    split(judged, calibration)  # refuses too few examples before anything is built
    if calibration.value_rates:
        config = replace(config, steps=1, learning_rate=1.0, gradient=find_gradient(model, judged))
    by_choices = isinstance(judged, ChoiceTokens)
    choices = _list_choices(config, judged)

    def begin(choice: BuildConfig, place: Path | None) -> Search:
        inputs = (model, tokenizer, listed, choice)
        with clock.measure("built"):
            if place is None:
                memory = build_memory(*inputs, on_progress=on_progress)
            else:
                memory = build_to(Destination(target=place, part=True), *inputs, on_progress)
        by_completions = by_choices or (choice.loss or choice.tokens) == "completion"
        reference = judged if by_completions else memory.reference_tokens()
        with learning_on(model, out_of_memory_advice(memory, calibration)):
            search = Search(Calibrator(model, memory, reference, calibration, on_progress, judged))
            search.begin()
        return search

    plan = {
        "calibration": as_json(calibration),
        "choices": [as_json(choice) for choice in choices],
        "model": as_json(identify(model, find_routers(model))),
        "reference": digest_reference(judged.provenance),
        **({"distractors": judged.digest} if isinstance(judged, ChoiceTokens) else {}),
    }
    with _open_workspace(folder, plan, overwrite=overwrite) as workspace:
        search, tried = _choose_tokens(choices, workspace.root if workspace else None, begin)
        memory = search.calibrator.memory
        with learning_on(model, out_of_memory_advice(memory, calibration)):
            search.run()
            found = conclude(search, started)
            if calibration.value_rates and not found.helps:
                memory = _shorten(model, memory)
        seconds = {**clock.seconds, **found.seconds_by_part}
        found = replace(found, token_choices=tried, seconds_by_part=seconds)
        calibrated = found.apply(memory)
        if workspace is not None:
            calibrated.save_pretrained(workspace.free("memory"))
            workspace.publish(workspace.root / "memory")
            calibrated = RoutingMemory.from_pretrained(workspace.target, verify=False)
    return calibrated, found


def _open_workspace(
    folder: str | Path | None, plan: Mapping[str, Any], *, overwrite: bool
) -> AbstractContextManager[Workspace | None]:
    """Return the workspace of `folder`; without a folder there is none."""
    return nullcontext() if folder is None else Workspace(Path(folder), plan, overwrite=overwrite)


def _choose_tokens(
    choices: Sequence[BuildConfig],
    root: Path | None,
    begin: Callable[[BuildConfig, Path | None], Search],
) -> tuple[Search, tuple[TokenChoice, ...]]:
    """Begin with each choice of tokens; return the best search, and all choices, best first.

    Memories are built below `root`, or in temporary folders. Only the best search is kept: each
    holds a memory.
    """
    best: Search | None = None
    tried: list[TokenChoice] = []
    for number, choice in enumerate(choices):
        search = begin(choice, root / f"choice-{number}" if root else None)
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


def find_gradient(model: nn.Module, reference: ReferenceTokens) -> str:
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
        # What is learned from a choice is learned from completions.
        if loss == "completion" or not isinstance(judged, ChoiceTokens)
    ]
