"""Build a memory that chooses its own settings: targets, then the cases, then their use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from knn_moe.adapt.calibrate.calibrate import calibrate
from knn_moe.adapt.calibrate.clock import Clock
from knn_moe.adapt.calibrate.config import CalibrationConfig
from knn_moe.adapt.calibrate.result import Calibration, Candidate, write_calibrated
from knn_moe.adapt.calibrate.splits import Reading, split
from knn_moe.adapt.calibrate.targets import choose_targets
from knn_moe.adapt.calibrate.trials import OnProgress
from knn_moe.build.build import BuildProgress, build_memory, fitting, reference_tokens
from knn_moe.config import BuildConfig
from knn_moe.inference.attach import check_free
from knn_moe.memory.files import refuse_existing
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.examples import ExampleLike, iter_examples
from knn_moe.reference.windows import ReferenceTokens
from knn_moe.routers.find import find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import forget_compiled_graphs

_SHARE: Final = 0.1  # of the reference set, on which ways to find better logits are tried
_LEAST_TOKENS, _MOST_TOKENS = 1024, 16384


def build_calibrated(
    model: nn.Module,
    tokenizer: Any,
    examples: str | Path | Iterable[ExampleLike],
    config: BuildConfig | None = None,
    calibration: CalibrationConfig | None = None,
    *,
    folder: str | Path | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
) -> tuple[RoutingMemory, Calibration]:
    """As build_memory, with η, S, the gradient, K, values and widths chosen by `examples`, and
    what that was found to be worth.

    Of `config` the rest is kept: which tokens, windows, batches. A kill while calibrating leaves
    the memory as it was built in `folder`.
    """
    config, calibration = config or BuildConfig(), calibration or CalibrationConfig()
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper would trace our hooks
    if folder is not None:
        refuse_existing(Path(folder), overwrite=False)
    check_free(model)
    listed = list(iter_examples(examples))
    reference = reference_tokens(model, tokenizer, listed, config)
    readings = _sample(reference, config, calibration)
    clock = Clock()
    with clock.on("ways to better logits"):
        learning = bool(calibration.value_rates)
        tried = _targets(model, readings, config, on_progress, learning=learning)

    def show(progress: BuildProgress) -> None:
        on_progress("building", progress.tokens, progress.total_tokens)

    chosen = tried[0].of(config)
    with clock.on("built"):
        memory = build_memory(model, tokenizer, listed, chosen, folder=folder, on_progress=show)
    found = calibrate(model, memory, config=calibration, on_progress=on_progress)
    found = replace(
        found, targets=tuple(tried), seconds_by_part={**clock.seconds, **found.seconds_by_part}
    )
    calibrated = found.apply(memory)
    return write_calibrated(calibrated, Path(folder)) if folder else calibrated, found


def _targets(
    model: nn.Module,
    readings: list[Reading],
    config: BuildConfig,
    on_progress: OnProgress,
    *,
    learning: bool,
) -> list[Candidate]:
    """Ways to better logits, the one to take first. `learning`: as in choose_targets."""
    forget_compiled_graphs()
    with fitting(config, tuple(readings[0].batch.ids.shape)), use_grouped_experts(model):
        return choose_targets(
            model,
            find_routers(model),
            readings,
            config,
            learning=learning,
            on_progress=lambda done, total: on_progress(
                "trying η, S and the gradient", done, total
            ),
        )


def _sample(
    reference: ReferenceTokens, config: BuildConfig, calibration: CalibrationConfig
) -> list[Reading]:
    """To try ways to find better logits on: of what is fitted alone. What is judged by must have no
    part in this either."""
    wanted = round(_SHARE * len(reference.provenance.stream))
    tokens = min(max(_LEAST_TOKENS, wanted), _MOST_TOKENS)
    part = split(reference, calibration).fitting.first(tokens)
    return list(part.readings(config.batch_tokens))
