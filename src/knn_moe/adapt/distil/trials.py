"""Train prototypes on one part of the reference set, and compare what comes out on others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from knn_moe.adapt.calibrate.clock import Clock
from knn_moe.adapt.calibrate.judge import Baseline, Judgement, judge_recalls
from knn_moe.adapt.calibrate.parts import cut_into_steps, split_for
from knn_moe.adapt.calibrate.result import TrialSummary
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.adapt.distil.prototypes import JudgedPrototypes, Start, nearest_cases
from knn_moe.adapt.distil.training import Training
from knn_moe.config import DistilConfig, LayerRouting, RoutingConfig
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
        return rows if len(rows) else torch.arange(len(provenance))

    def _begin(self, cases: torch.Tensor) -> list[Start]:
        full = self.memory.full_layers()
        count = self.config.prototypes
        return [Start.of(router, full[router.layer].keys, cases, count) for router in self.routers]

    def try_rate(self, rate: float) -> Trial | None:
        """Train at a rate, and return the best of its passes. None: it diverged.

        A pass later than the best one is made, to see that it is no better.
        """
        best: Trial | None = None
        for trial in self._train(self.starts, self.batches, rate, f"rate {rate:g}"):
            if best is None or trial.judgement.loss < best.judgement.loss:
                best = trial
            elif trial.passes > best.passes + 1:
                break
        return best

    def _train(
        self, starts: Sequence[Start], batches: Sequence[Batch], rate: float, name: str
    ) -> Iterator[Trial]:
        """Yield the prototypes after each pass, until they diverge."""
        training = self._training(starts, batches, rate)
        step = self.counter.steps_of(name)
        for done in range(1, self.config.passes + 1):
            with self.clock.measure(name):
                training.run_pass(step)
                layers = training.read()
            try:
                if layers is None:
                    return
                judged = self.judge(layers, self.choosing)
            except DivergedError:
                return
            yield Trial(rate, done, layers, judged)

    def _training(self, starts: Sequence[Start], batches: Sequence[Batch], rate: float) -> Training:
        dtype = next(iter(self.memory.layers.values())).shape.dtype
        return Training(self.model, starts, dtype, batches, self.config.passes, rate, self.gradient)

    def judge(
        self,
        layers: Mapping[int, DistilledLayer],
        baseline: Baseline,
        off: frozenset[int] = frozenset(),
    ) -> Judgement:
        """Compare the model that recalls `layers`, but those that are `off`, with itself alone.

        Raises:
            DivergedError: The losses are not finite.
        """
        config = RoutingConfig(k=1)
        recalls = [
            JudgedPrototypes(
                router, DistilledRecall(layers[router.layer], config, 1.0, router.device)
            )
            for router in self.routers
            if router.layer not in off
        ]
        with self.clock.measure("judged"):
            return judge_recalls(self.model, recalls, baseline)

    def turn_off_layers(self, trial: Trial) -> Trial:
        """Leave those layers to the router without which the loss is no higher, one by one."""
        for index in trial.layers:
            off = trial.off | {index}
            if len(off) == len(trial.layers):
                break
            judged = self.judge(trial.layers, self.choosing, off)
            if judged.loss <= trial.judgement.loss:
                trial = replace(trial, off=off, judgement=judged)
        return trial

    def judge_unseen(self, trial: Trial) -> Judgement:
        """Judge a trial on examples that had no part in anything before."""
        return self.judge(trial.layers, self._read_alone(self.splits.judge), trial.off)

    def train_on_all(self, trial: Trial) -> Trial:
        """Train as `trial` was trained, on the held-out examples as well."""
        batches = [*self.batches, *self._cut(self.splits.held_out)]
        starts = self._begin(torch.arange(len(self.memory)))
        training = self._training(starts, batches, trial.rate)
        step = self.counter.steps_of(_ALL)
        with self.clock.measure(_ALL):
            for _ in range(trial.passes):
                training.run_pass(step)
            layers = training.read()
        return trial if layers is None else replace(trial, layers=layers)

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
