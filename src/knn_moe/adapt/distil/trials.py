"""Train prototypes on one part of the reference set, and compare what comes out on others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from knn_moe.adapt.calibrate.clock import Clock
from knn_moe.adapt.calibrate.judge import Baseline, Judgement, compare, read_batches
from knn_moe.adapt.calibrate.parts import cut_into_steps, split_for
from knn_moe.adapt.calibrate.result import TrialSummary
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.adapt.distil.prototypes import JudgedPrototypes, Start, nearest_cases
from knn_moe.adapt.distil.training import Training
from knn_moe.config import DistilConfig, LayerRouting, RoutingConfig
from knn_moe.errors import CalibrationError
from knn_moe.inference.attach import routers_for
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.distilled import DistilledRecall
from knn_moe.reference.choices import ChoiceTokens
from knn_moe.reference.provenance import owners
from knn_moe.reference.splits import Part
from knn_moe.reference.windows import Batch, ReferenceTokens
from knn_moe.support.progress import OnProgress, StepCounter

_SHOWN: Final = 8  # prototypes that explanations show
_ALL: Final = "trained on all examples"


@dataclass(frozen=True)
class Trial:
    """Prototypes after some passes at one rate, judged on the examples to choose by."""

    rate: float
    passes: int
    layers: Mapping[int, DistilledLayer]
    judgement: Judgement
    off: frozenset[int] = frozenset()  # layers that are left to the router

    @property
    def name(self) -> str:
        return f"rate {self.rate:g}, {self.passes} {'pass' if self.passes == 1 else 'passes'}"

    def summary(self) -> TrialSummary:
        """Return the numbers without the prototypes."""
        change, loss = self.judgement.change, self.judgement.loss
        return TrialSummary(self.name, loss, change.difference, change.low, change.high)

    def routing(self, memory: RoutingMemory) -> RoutingConfig:
        """Return how the layers are used: those that are off have a confidence factor of 0."""
        off = tuple(LayerRouting(layer=index, confidence_factor=0.0) for index in sorted(self.off))
        return RoutingConfig(
            k=_SHOWN,
            per_layer=off,
            layers=memory.routing.layers,
            spare_first_token=True,
            stats=memory.routing.stats,
        )


class Distiller:
    """A model, a memory's keys, and the parts of a reference set to learn and to judge on.

    Args:
        model: The model alone.
        memory: The memory whose keys say where prototypes start.
        reference: The reference set.
        config: How to distil.
        gradient: "dense" or "sparse", as in a build.
        on_progress: Called after each step.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: RoutingMemory,
        reference: ReferenceTokens,
        config: DistilConfig,
        gradient: str,
        on_progress: OnProgress,
    ) -> None:
        self.model, self.memory, self.config, self.gradient = model, memory, config, gradient
        self.splits = split_for(model, reference, reference, config)
        self.by_choices = isinstance(self.splits.choose.reference, ChoiceTokens)
        everywhere = RoutingConfig(layers=memory.routing.layers)
        self.routers = routers_for(model, memory, everywhere, force=True)
        self.clock = Clock()
        self.batches = self._cut(self.splits.fit)
        more = len(self._cut(self.splits.held_out))
        steps = (len(config.rates) + 1) * len(self.batches) + more
        self.counter = StepCounter(on_progress, config.passes * steps)
        with self.clock.measure("start of the prototypes"):
            self.starts = self._begin(self._unseen_cases())
        self.choosing = self._read_alone(self.splits.choose)

    def _cut(self, part: Part) -> list[Batch]:
        most = min(self.config.step_tokens, self.memory.build.batch_tokens)
        return cut_into_steps(part, self.splits.fit.tokens, most)

    def _read_alone(self, part: Part) -> Baseline:
        with self.clock.measure("judged"):
            return Baseline.of(self.model, list(part.batches(self.memory.build.batch_tokens)))

    def _unseen_cases(self) -> torch.Tensor:
        """Return the cases of examples that are neither to choose nor to judge by. Shape [n]."""
        provenance = self.memory.provenance
        held_out = torch.cat(
            [part.reference.owners[part.windows] for part in self.splits[1:3]]
        ).unique()
        seen = torch.isin(owners(provenance), held_out)[provenance.window]
        rows = (~seen).nonzero().flatten()
        if not len(rows):
            raise CalibrationError(
                f"All cases of {self.memory!r} are of examples that are held out to judge by. "
                f"Distil a memory of more examples."
            )
        return rows

    def _begin(self, cases: torch.Tensor) -> list[Start]:
        full, count = self.memory.full_layers(), self.config.prototypes
        return [Start.of(router, full[router.layer].keys, cases, count) for router in self.routers]

    def try_rate(self, rate: float) -> Trial | None:
        """Train at a rate, and return the best of its passes. None: it diverged.

        Two passes in a row that are no better than the best end it.
        """
        best: Trial | None = None
        for trial in self._train(rate):
            if best is None or trial.judgement.loss < best.judgement.loss:
                best = trial
            elif trial.passes > best.passes + 1:
                break
        return best

    def _train(self, rate: float) -> Iterator[Trial]:
        """Yield the prototypes after each pass, until they diverge."""
        training, name = self._training(self.batches, rate), f"rate {rate:g}"
        step = self.counter.steps_of(name)
        for done in range(1, self.config.passes + 1):
            with self.clock.measure(name):
                training.run_pass(step)
                layers = training.read()
            try:
                if layers is None:
                    return
                judged = self._judge(self._open(layers), self.choosing)
            except DivergedError:
                return
            yield Trial(rate, done, layers, judged)

    def _training(self, batches: Sequence[Batch], rate: float) -> Training:
        dtype = next(iter(self.memory.layers.values())).shape.dtype
        return Training(
            self.model, self.starts, dtype, batches, self.config.passes, rate, self.gradient
        )

    def _open(self, layers: Mapping[int, DistilledLayer]) -> dict[int, DistilledRecall]:
        """Put layers on their routers' devices, as they are used."""
        config = RoutingConfig(k=1)
        return {
            router.layer: DistilledRecall(layers[router.layer], config, 1.0, router.device)
            for router in self.routers
        }

    def _judge(
        self,
        recalls: Mapping[int, DistilledRecall],
        baseline: Baseline,
        off: frozenset[int] = frozenset(),
    ) -> Judgement:
        """Compare the model that recalls layers, but those that are `off`, with itself alone.

        Raises:
            DivergedError: The losses are not finite.
        """
        judged = [
            JudgedPrototypes(router, recalls[router.layer])
            for router in self.routers
            if router.layer not in off
        ]
        with self.clock.measure("judged"):
            return compare(read_batches(self.model, judged, baseline), baseline)

    def turn_off_layers(self, trial: Trial) -> Trial:
        """Leave those layers to the router without which the loss is no higher, one by one."""
        recalls = self._open(trial.layers)
        for index in trial.layers:
            off = trial.off | {index}
            if len(off) == len(trial.layers):
                break
            judged = self._judge(recalls, self.choosing, off)
            if judged.loss <= trial.judgement.loss:
                trial = replace(trial, off=off, judgement=judged)
        return trial

    def judge_unseen(self, trial: Trial) -> Judgement:
        """Judge a trial on examples that had no part in anything before."""
        return self._judge(self._open(trial.layers), self._read_alone(self.splits.judge), trial.off)

    def train_on_all(self, trial: Trial) -> Trial:
        """Train as `trial` was trained, from the same start, on the held-out examples as well.

        The trial itself is returned where this does not lower the loss that it learned from.
        """
        batches = [*self.batches, *self._cut(self.splits.held_out)]
        training = self._training(batches, trial.rate)
        step = self.counter.steps_of(_ALL)
        with self.clock.measure(_ALL):
            for _ in range(trial.passes):
                training.run_pass(step)
            layers = training.read()
        try:
            judged = layers and self._judge(self._open(layers), self.choosing, trial.off)
        except DivergedError:
            return trial
        worked = layers and judged and judged.loss < judged.alone
        return replace(trial, layers=layers) if layers and worked else trial

    def name_cases(self, trial: Trial) -> dict[int, DistilledLayer]:
        """Return the layers, with the case that is nearest to each prototype."""
        full = self.memory.full_layers()
        with self.clock.measure("nearest cases"):
            return {
                router.layer: replace(
                    layer := trial.layers[router.layer],
                    cases=nearest_cases(layer, full[router.layer].keys, router.device),
                )
                for router in self.routers
            }
