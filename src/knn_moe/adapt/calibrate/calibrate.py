"""Choose how a memory is used, on its own reference set: neighbours, widths, values, layers.

On one part of the examples the widths of every layer are fitted by gradient, for each number of
neighbours, with how much is made of what the build changed; then the values. By a second part the
best of these is chosen; on a third, that had no part in either, it is judged against the model
alone. A memory that is not significantly better there is told to keep silent (confidence_factor 0).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from knn_moe.adapt.calibrate.config import CalibrationConfig
from knn_moe.adapt.calibrate.result import Calibration, Outcome
from knn_moe.adapt.calibrate.splits import own_reference
from knn_moe.adapt.calibrate.trials import OnProgress, Trial, Workbench
from knn_moe.build.build import reference_tokens
from knn_moe.errors import CalibrationError, ConfigError, ModelTooLargeError
from knn_moe.inference.attach import check_belongs
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.examples import ExampleLike, iter_examples
from knn_moe.reference.provenance import owners
from knn_moe.reference.windows import ReferenceTokens
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.model_state import forget_compiled_graphs


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
    _check_no_control(memory)
    if not force:
        check_belongs(model, memory)
    reference = _reference(model, memory, examples, tokenizer)
    forget_compiled_graphs()
    with torch.inference_mode(False), use_grouped_experts(model), _fitting_in(memory, config):
        bench = Workbench(model, memory, reference, config, on_progress)
        choice = _tried(bench)
        best = choice.best
        judged = bench.judge(best)
        head = bench.choose_head(best) if config.head and judged.better else None
        last = bench.learn_from_all(best) if judged.better else best.silenced()
    mixed_in = head.config if head and head.helps else None
    return Calibration(
        routing=replace(last.routing, head=mixed_in),
        judgement=judged,
        trials=tuple(choice.outcomes),
        chosen=best.name,
        distances=bench.distances(best.routing.k),
        values=last.values,
        update_scale=last.update_scale,
        learned=last.taught is not None,
        head=head,
        seconds=time.monotonic() - started,
        seconds_by_part=bench.clock.seconds,
    )


def _check_no_control(memory: RoutingMemory) -> None:
    if memory.routing.drawn is not None:
        raise CalibrationError(
            "This memory is a control, used with cases drawn at random: calibrate the memory it "
            "was made from."
        )


def _tried(bench: Workbench) -> _Choice:
    """Widths for the most neighbours, and from there on for fewer; with the best of them, values;
    and the memory as it was."""
    choice = _Choice()
    *fewer, most = bench.counts
    first = bench.fit_widths(most)
    choice.offer(first)
    for k in reversed(fewer):
        choice.offer(bench.fit_widths(k, first))
    del first  # its values take as much room as the best one's
    fitted = choice.best
    for rate in bench.config.value_rates:
        choice.offer(bench.learn_values(fitted, rate))
    choice.offer(bench.usual())
    return choice


class _Choice:
    """The best of what was tried; of the others, whose values take as much room, what they came to
    alone."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._best: Trial | None = None

    def offer(self, trial: Trial | None) -> None:
        """None: it led nowhere."""
        if trial is None:
            return
        self.outcomes.append(trial.outcome())
        if self._best is None or trial.judgement.loss < self._best.judgement.loss:
            self._best = trial

    @property
    def best(self) -> Trial:
        if self._best is None:
            raise CalibrationError(
                "No way to use this memory gave the model a finite loss: its values or the model "
                "may overflow. Build it with smaller steps, or use another dtype."
            )
        return self._best


def _reference(
    model: nn.Module, memory: RoutingMemory, examples: Iterable[ExampleLike] | None, tokenizer: Any
) -> ReferenceTokens:
    if examples is None:
        reference = own_reference(memory)
    elif tokenizer is None:
        raise ConfigError("calibrate reads examples with their tokenizer: pass tokenizer=….")
    else:
        reference = reference_tokens(model, tokenizer, iter_examples(examples), memory.build)
    _check_impartial(memory, reference)
    return reference


def _check_impartial(memory: RoutingMemory, reference: ReferenceTokens) -> None:
    """Examples that had a part in what a memory is now cannot judge it."""
    if memory.manifest.impartial:
        return
    if torch.isin(owners(reference.provenance), owners(memory.provenance)).any():
        how = "was pruned by what its own examples gained from it"
        if memory.manifest.learned:
            how = "has values that were fitted to its own examples"
        raise CalibrationError(
            f"{memory!r} {how}, so they cannot judge it. Calibrate the memory as it was built (or "
            f"pruned by chance), or give other examples."
        )


@contextmanager
def _fitting_in(memory: RoutingMemory, config: CalibrationConfig) -> Iterator[None]:
    """Running out of memory, said in words."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        exhausted = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not exhausted and "can't allocate memory" not in str(error):
            raise
        raise ModelTooLargeError(
            f"Calibrating takes the whole memory ({memory.nbytes / 1e9:,.1f} GB), seven times its "
            f"values to learn them, and a backward pass of {config.step_tokens:,} tokens beside "
            f"the model, and they did not fit. Keep the values as they are (--keep-values, "
            f"value_rates=()), try fewer neighbours (-k), lower step_tokens, or calibrate a memory "
            f"of fewer examples."
        ) from None
