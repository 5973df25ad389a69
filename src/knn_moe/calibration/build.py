"""Build a memory that chooses its own settings: targets, then the cases, then their use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from knn_moe.build import BuildProgress, build_memory, reference_tokens
from knn_moe.calibration.calibrate import CalibrationConfig, OnProgress, calibrate
from knn_moe.calibration.slices import draw
from knn_moe.calibration.targets import choose_targets
from knn_moe.config import BuildConfig
from knn_moe.memory import RoutingMemory
from knn_moe.reference import ExampleLike, iter_examples
from knn_moe.routers import find_routers
from knn_moe.writer import reseal

_SHARE: Final = 0.1  # of the reference set, on which ways to find better logits are tried
_LEAST_TOKENS: Final = 2048


def build_calibrated(
    model: nn.Module,
    tokenizer: Any,
    examples: Iterable[ExampleLike],
    config: BuildConfig | None = None,
    calibration: CalibrationConfig | None = None,
    *,
    folder: str | Path | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
) -> RoutingMemory:
    """As build_memory, with η, S, the gradient, K and every layer's kernels chosen by `examples`.

    Of `config` the rest is kept: which tokens, windows, batches.
    """
    config, calibration = config or BuildConfig(), calibration or CalibrationConfig()
    listed = list(iter_examples(examples))
    reference = reference_tokens(model, tokenizer, listed, config)
    wanted = max(_LEAST_TOKENS, round(_SHARE * len(reference.provenance.stream)))
    readings = list(draw(reference, wanted, calibration.seed).readings(config.batch_tokens))
    tried = choose_targets(model, find_routers(model), readings, config)
    chosen = tried[0].of(config)

    def show(progress: BuildProgress) -> None:
        on_progress("building", progress.tokens, progress.total_tokens)

    memory = build_memory(model, tokenizer, listed, chosen, folder=folder, on_progress=show)
    found = calibrate(model, memory, config=calibration, on_progress=on_progress)
    header = replace(
        memory.header,
        routing=found.routing,
        calibration={**found.report(), "targets": [vars(each) for each in tried]},
    )
    if memory.folder is not None:
        reseal(memory.folder, header)
    return replace(memory, header=header)
