"""Try ways to use a memory on parts of its reference set that have no example in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from torch import Tensor, nn

from knn_moe.adapt.calibrate.clock import Clock
from knn_moe.adapt.calibrate.fit import FitCases, FitData, fit_widths, look_up_neighbours
from knn_moe.adapt.calibrate.judge import (
    Baseline,
    Judgement,
    Reading,
    compare,
    judge,
    read_recalling,
)
from knn_moe.adapt.calibrate.language_head import HeadChoice, HeadReader, choose_head
from knn_moe.adapt.calibrate.parts import cut_into_steps, split_for
from knn_moe.adapt.calibrate.result import Distances, TrialSummary
from knn_moe.adapt.calibrate.start import Direction, Start, choose_start
from knn_moe.adapt.calibrate.values import ValueTraining, train_values
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.config import CalibrationConfig, RoutingConfig
from knn_moe.errors import CalibrationError
from knn_moe.inference.attach import routers_for
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.choices import ChoiceTokens
from knn_moe.reference.provenance import owners
from knn_moe.reference.splits import Part
from knn_moe.reference.windows import Batch, ReferenceTokens
from knn_moe.support.progress import OnProgress, StepCounter

_WIDTH_PASSES: Final = 2  # over the examples to fit, at most
_SAMPLE: Final = 4096  # tokens of the examples to fit that settle where values start
_TRIED_RATES: Final = 3  # of the rates in the config, usually
_AGAIN: Final = "judged again"


@dataclass(frozen=True)
class Trial:
    """One way to use a memory, judged on the examples to choose by."""

    name: str
    routing: RoutingConfig
    cases: Sequence[FitCases]
    judgement: Judgement
    fitted: bool = False  # whether its widths were
    values_changed: bool = False
    training: StartOfTraining | None = None  # by which its values were trained
    narrowing: float = 1.0  # what the γ of λ was multiplied by after all fits

    @property
    def values(self) -> dict[int, Tensor] | None:
        """The values by layer; None where they are the memory's own."""
        if not self.values_changed:
            return None
        return {each.router.layer: each.values.cpu() for each in self.cases}

    @property
    def update_scale(self) -> dict[int, float]:
        """The update scale by layer."""
        return {
            each.router.layer: each.update_scale if self.values_changed else 1.0
            for each in self.cases
        }

    def summary(self) -> TrialSummary:
        """Return the numbers without the values, which take much room."""
        change, loss = self.judgement.change, self.judgement.loss
        return TrialSummary(self.name, loss, change.difference, change.low, change.high)

    def turned_off(self) -> Trial:
        """Return the same with a confidence factor of 0 in every layer, and the memory's values."""
        layers = [self.routing.for_layer(each.router.layer) for each in self.cases]
        off = tuple(replace(layer, confidence_factor=0.0) for layer in layers)
        return replace(
            self,
            routing=replace(self.routing, per_layer=off),
            values_changed=False,
            training=None,
        )


class StartOfTraining(NamedTuple):
    """The cases and the widths that values were trained from, and the learning rate."""

    cases: Sequence[FitCases]
    routing: RoutingConfig
    rate: float


class Calibrator:
    """A model, a memory's cases, and the parts of a reference set to try them on.

    Args:
        model: The model alone.
        memory: The memory to calibrate.
        reference: The reference set; values and widths descend the loss of its scored tokens.
        config: How to calibrate.
        on_progress: Called after each step of a fit.
        judged: The same reference set with the scored tokens that trials are judged by. None:
            those of `reference`.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: RoutingMemory,
        reference: ReferenceTokens,
        config: CalibrationConfig,
        on_progress: OnProgress,
        judged: ReferenceTokens | None = None,
    ) -> None:
        self.model = model
        self.memory = memory
        self.config = config
        self.splits = split_for(model, reference, judged or reference, config)
        self.ks = _possible_ks(memory, config)
        self.cases: Sequence[FitCases] = _open_cases(model, memory)
        batches = self._fit_batches(self.splits.fit)
        self.steps = min(config.steps, _WIDTH_PASSES * len(batches))
        self.counter = StepCounter(on_progress, self._expect_steps(len(batches)))
        self.clock = Clock()
        self.data = self._look_up(batches)
        self.choosing = Baseline.of(model, self._judge_batches(self.splits.choose))

    @property
    def by_choices(self) -> bool:
        """Whether trials are compared by the choice among completions."""
        return isinstance(self.splits.choose.reference, ChoiceTokens)

    def _expect_steps(self, batches: int) -> int:
        """Estimate the steps of all fits; how many rates are tried is known only in the end."""
        if not self.config.value_rates:
            return self.steps + (len(self.ks) - 1) * self._fewer_steps
        trials = min(len(self.config.value_rates), _TRIED_RATES) + len(self.ks) - 1
        everything = batches + len(self._fit_batches(self.splits.held_out))
        return self.steps + self.config.passes * (trials * batches + everything)

    @cached_property
    def start(self) -> Start:
        """Where the values start."""
        return self._choose_start(self.data)

    def _choose_start(self, data: FitData) -> Start:
        with self.clock.measure("start of the values"):
            directions = [Direction.of(each) for each in self.cases]
            return choose_start(self.model, directions, data.sample(_SAMPLE), self.ks[-1])

    def try_unchanged(self) -> Trial | None:
        """Try the memory as it is used now, but for the first token.

        None where that cannot be judged here: another similarity than RBF, or a routing that these
        very examples may have chosen before.
        """
        routing = self.memory.routing
        calibrated = self.memory.manifest.calibration is not None
        if calibrated or routing.similarity != "rbf":
            return None
        sparing = replace(routing, spare_first_token=True)
        return self._judge_trial("unchanged", sparing, self.cases)

    def try_widths(self, k: int, start: Trial | None = None) -> Trial | None:
        """Fit widths for K = k, and rescale the values, unless they are to stay.

        Starting from a fit for another K takes half the steps. None: the fit diverged.
        """
        name = f"widths, K = {k}"
        routing = self._routing(k)
        if start is not None:
            routing = replace(routing, per_layer=start.routing.per_layer)
        steps = self.steps if start is None else self._fewer_steps
        try:
            cases = self.start.cases if self.config.value_rates else self.cases
            fitted = self._fit_widths(cases, self.data, routing, steps, name)
        except DivergedError:
            return None
        trial = self._judge_trial(name, *fitted)
        changing = bool(self.config.value_rates)
        return trial and replace(trial, fitted=True, values_changed=changing)

    def try_values(self, start: Trial, k: int, rate: float) -> Trial | None:
        """Train values for K = k at `rate`, from a trial of widths on. None: it diverged."""
        name = f"values, K = {k}, rate {rate:g}"
        training = StartOfTraining(start.cases, start.routing, rate)
        trained = self._train(self.data, training, k, name)
        trial = trained and self._judge_trial(name, *trained)
        return trial and replace(trial, fitted=True, values_changed=True, training=training)

    def _fit_widths(
        self,
        cases: Sequence[FitCases],
        data: FitData,
        routing: RoutingConfig,
        steps: int,
        name: str,
    ) -> tuple[RoutingConfig, Sequence[FitCases]]:
        """Fit widths; raise DivergedError if the fit diverges."""
        step = self.counter.steps_of(name)
        with self.clock.measure(name):
            widths, fitted = fit_widths(self.model, cases, data, routing, steps, step)
        return replace(routing, per_layer=widths), fitted

    def try_narrower(self, trial: Trial, factor: float) -> Trial | None:
        """Try the same with λ taken by a γ `factor` times as large. None: the losses overflow."""
        name, routing = f"{trial.name}, λ by γ × {factor:g}", self._narrow(trial.routing, factor)
        narrower = self._judge_trial(name, routing, trial.cases)
        return narrower and replace(
            trial, name=name, routing=routing, judgement=narrower.judgement, narrowing=factor
        )

    def _narrow(self, routing: RoutingConfig, factor: float) -> RoutingConfig:
        if factor == 1:
            return routing
        layers = [routing.for_layer(each.router.layer) for each in self.cases]
        return replace(
            routing,
            per_layer=tuple(
                replace(layer, confidence_scale=layer.confidence_scale * factor) for layer in layers
            ),
        )

    def _routing(self, k: int) -> RoutingConfig:
        kept = self.memory.routing
        return RoutingConfig(
            k=k, layers=kept.layers, spare_first_token=True, index=kept.index, stats=kept.stats
        )

    @property
    def _fewer_steps(self) -> int:
        return -(-self.steps // 2)

    def train_on_all(self, trial: Trial) -> Trial:
        """Train values, where they were trained, on the held-out examples as well."""
        if trial.training is None:
            return trial
        more = self._look_up(self._fit_batches(self.splits.held_out))
        name = "values, from all examples"
        trained = self._train(self.data.extend(more), trial.training, trial.routing.k, name)
        if trained is None:  # the values that were judged are there still
            return trial
        routing = self._narrow(trained[0], trial.narrowing)
        return replace(trial, routing=routing, cases=trained[1])

    def _train(
        self, data: FitData, start: StartOfTraining, k: int, name: str
    ) -> tuple[RoutingConfig, list[FitCases]] | None:
        routing = replace(start.routing, k=k)
        training = ValueTraining(
            self.config.passes, start.rate, self.memory.build.gradient, self.start.spreads
        )
        self.counter.expect(self.config.passes * len(data.batches))
        step = self.counter.steps_of(name)
        try:
            with self.clock.measure(name):
                widths, cases = train_values(self.model, start.cases, data, routing, training, step)
        except DivergedError:
            return None
        return replace(routing, per_layer=widths), cases

    @cached_property
    def judging(self) -> Baseline:
        """The model alone on examples that have no part in anything before."""
        return Baseline.of(self.model, self._judge_batches(self.splits.judge))

    def judge(self, trial: Trial) -> Judgement:
        """Judge a trial on the examples to judge by."""
        with self.clock.measure("judged"):
            return judge(self.model, trial.cases, self.judging, trial.routing)

    def judge_again(self, trial: Trial) -> Judgement:
        """Judge on the examples to fit on as well: each half of them by what is learned from all
        examples but this half, in the way of `trial`.

        Raises:
            DivergedError: The losses are not finite.
        """
        readings = [read_recalling(self.model, trial.cases, self.judging, trial.routing)]
        parts = [self.judging]
        held_out = self._look_up(self._fit_batches(self.splits.held_out))
        for half in self.splits.judged_fit.halves():
            rest = self._look_up(self._fit_batches(self.splits.fit.without(half)))
            routing, cases = self._learn_again(rest.extend(held_out), trial)
            routing = self._narrow(routing, trial.narrowing) if trial.fitted else routing
            with self.clock.measure(_AGAIN):
                batches = self._judge_batches(half.first(self.config.judge_tokens))
                parts.append(Baseline.of(self.model, batches))
                readings.append(read_recalling(self.model, cases, parts[-1], routing))
        tokens = [int(part.tokens.sum()) for part in parts]
        return compare(Reading.join(readings, tokens), Baseline.join(parts), looks=2)

    def _learn_again(self, data: FitData, trial: Trial) -> tuple[RoutingConfig, Sequence[FitCases]]:
        """Learn from other data what `trial` learned: where values start, widths, and values at
        the same rate."""
        if not trial.fitted:
            return trial.routing, trial.cases
        training, k = trial.training, trial.routing.k
        self.counter.expect(
            self.steps + (self.config.passes * len(data.batches) if training else 0)
        )
        cases = self._choose_start(data).cases if self.config.value_rates else self.cases
        routing = self._routing(self.ks[-1] if training else k)
        fitted = self._fit_widths(cases, data, routing, self.steps, _AGAIN)
        if training is None:
            return fitted
        start = StartOfTraining(fitted[1], fitted[0], training.rate)
        learned = self._train(data, start, k, _AGAIN)
        if learned is None:
            raise DivergedError
        return learned

    def choose_head(self, trial: Trial, *, routed: bool) -> HeadChoice:
        """Choose a head for a model whose memory is used as in `trial`, if it routes at all."""
        parts, routing = (self.choosing, self.judging), trial.routing
        with self.clock.measure("head"):
            return choose_head(self.model, trial.cases, self.memory, routing, parts, routed=routed)

    def read_head_keys(self, head: HeadChoice, trial: Trial) -> HeadChoice:
        """Read the hidden states that a head looks up again, with the routing of `trial`."""
        if head.config.keys != "hidden" or head.config.alone:
            return head
        routing = replace(trial.routing, head=None)
        with self.clock.measure("head"):
            reader = HeadReader(self.model, trial.cases, self.memory, routing)
        return replace(head, keys=reader.stored)

    def distances(self, k: int) -> dict[int, Distances]:
        """Return the mean distances to the nearest, and to the last of k neighbours."""
        last = min(k, self.ks[-1]) - 1
        return {
            each.router.layer: Distances(table.mean_distance(0), table.mean_distance(last))
            for each, table in zip(self.cases, self.data.tables, strict=True)
        }

    def _judge_trial(
        self, name: str, routing: RoutingConfig, cases: Sequence[FitCases]
    ) -> Trial | None:
        try:
            with self.clock.measure("judged"):
                judged = judge(self.model, cases, self.choosing, routing)
        except DivergedError:
            return None
        return Trial(name, routing, cases, judged)

    def _look_up(self, batches: Sequence[Batch]) -> FitData:
        """Find the neighbours of each token, for the largest K."""
        with self.clock.measure("neighbours looked up"):
            return look_up_neighbours(self.model, self.cases, batches, self.ks[-1])

    def _fit_batches(self, part: Part) -> list[Batch]:
        most = min(self.config.step_tokens, self.memory.build.batch_tokens)
        return cut_into_steps(part, self.splits.fit.tokens, most)

    def _judge_batches(self, part: Part) -> list[Batch]:
        return list(part.batches(self.memory.build.batch_tokens))


def _possible_ks(memory: RoutingMemory, config: CalibrationConfig) -> list[int]:
    """Return the values of K for which every example finds enough cases of others."""
    sizes = owners(memory.provenance)[memory.provenance.window].unique(return_counts=True)[1]
    most = len(memory) - int(sizes.max()) if len(sizes) else 0
    if most < 1:
        raise CalibrationError(
            f"{memory!r} cannot be calibrated: its examples have no others to recall."
        )
    return sorted({min(k, most) for k in config.neighbours})


def _open_cases(model: nn.Module, memory: RoutingMemory) -> list[FitCases]:
    """Put the cases of each layer that the memory's routing uses on its router's device."""
    layers = memory.full_layers()
    owner = owners(memory.provenance)[memory.provenance.window]
    everywhere = RoutingConfig(layers=memory.routing.layers)
    return [
        FitCases(
            router,
            layers[router.layer].keys.to(router.device),
            layers[router.layer].values.to(router.device),
            owner.to(router.device),
            layers[router.layer].gamma,
        )
        for router in routers_for(model, memory, everywhere, force=True)
    ]
