"""Build a memory that chooses its own settings: targets, then the cases, then their use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from knn_moe.adapt.calibrate.calibrate import calibrate
from knn_moe.adapt.calibrate.clock import Clock
from knn_moe.adapt.calibrate.result import Calibration, write_calibrated
from knn_moe.adapt.calibrate.targets import choose_targets
from knn_moe.build.build import batch_fits, build_memory, reference_tokens
from knn_moe.config import BuildConfig, CalibrationConfig
from knn_moe.inference.attach import check_free
from knn_moe.memory.files import refuse_existing
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.examples import ExampleLike, iter_examples
from knn_moe.reference.splits import split
from knn_moe.reference.windows import Batch, ReferenceTokens
from knn_moe.routers.find import find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import forget_compiled_graphs, uncompiled
from knn_moe.support.progress import OnProgress, ignore_progress

_SHARE: Final = 0.1  # of the reference set, on which targets are tried
_LEAST_TOKENS, _MOST_TOKENS = 1024, 16384


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
    """Build a memory as `build_memory` does, with η, S, the gradient, K, widths and values chosen
    by `examples`.

    A kill during calibration leaves the memory as it was built in `folder`.

    Args:
        model: A Hugging Face MoE model.
        tokenizer: Its tokenizer.
        examples: A file, or any iterable of examples; see `load_examples`.
        config: What is not chosen: which tokens, windows and batches.
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
    config, calibration = config or BuildConfig(), calibration or CalibrationConfig()
    model = uncompiled(model)
    if folder is not None:
        refuse_existing(Path(folder), overwrite=False)
    check_free(model)
    listed = list(iter_examples(examples))
    reference = reference_tokens(model, tokenizer, listed, config)
    sample = _draw_sample(reference, config, calibration)
    clock = Clock()
    forget_compiled_graphs()
    with (
        clock.measure("targets tried"),
        batch_fits(config, sample[0]),
        use_grouped_experts(model),
    ):
        targets = choose_targets(
            model,
            find_routers(model),
            sample,
            config,
            values_trained=bool(calibration.value_rates),
            on_progress=on_progress,
        )
    chosen = targets[0].apply(config)
    with clock.measure("built"):
        memory = build_memory(
            model, tokenizer, listed, chosen, folder=folder, on_progress=on_progress
        )
    found = calibrate(model, memory, config=calibration, on_progress=on_progress)
    seconds = {**clock.seconds, **found.seconds_by_part}
    found = replace(found, targets=tuple(targets), seconds_by_part=seconds)
    calibrated = found.apply(memory)
    return write_calibrated(calibrated, Path(folder)) if folder else calibrated, found


def _draw_sample(
    reference: ReferenceTokens, config: BuildConfig, calibration: CalibrationConfig
) -> list[Batch]:
    """Take the sample from the examples to fit: those that judge must have no part in it."""
    wanted = round(_SHARE * len(reference.provenance.stream))
    tokens = min(max(_LEAST_TOKENS, wanted), _MOST_TOKENS)
    part = split(reference, calibration).fit.first(tokens)
    return list(part.batches(config.batch_tokens))
