"""Ways to use a memory, tried on parts of its reference set that have no example in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from torch import Tensor, nn

from knn_moe.adapt.calibrate.clock import Clock
from knn_moe.adapt.calibrate.config import CalibrationConfig
from knn_moe.adapt.calibrate.fit import Cases, Studied, find_neighbours, fit_widths
from knn_moe.adapt.calibrate.judge import Baseline, Judgement, judge
from knn_moe.adapt.calibrate.language_head import HeadFound, choose_head
from knn_moe.adapt.calibrate.result import Distances, Outcome
from knn_moe.adapt.calibrate.splits import Reading, Slice, split
from knn_moe.adapt.calibrate.values import Learning, learn_values
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.config import RoutingConfig
from knn_moe.errors import CalibrationError
from knn_moe.inference.attach import routers_for
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.provenance import owners
from knn_moe.reference.windows import ReferenceTokens
from knn_moe.routers.find import find_routers
from knn_moe.routers.intercept import find_hook

OnProgress = Callable[[str, int, int], None]
_WIDTH_PASSES: Final = 2  # over the fitted examples, at most
_STEPS_A_PASS, _LEAST_TOKENS = 24, 64  # at least, of as many tokens at least


@dataclass(frozen=True)
class Trial:
    """One way to use a memory. `taught`: by which its values learned."""

    name: str
    routing: RoutingConfig
    cases: Sequence[Cases]
    judgement: Judgement  # on the examples to choose by
    changed: bool = False  # whether its values are others than the memory's
    taught: Teaching | None = None

    @property
    def values(self) -> dict[int, Tensor] | None:
        """By layer, where they are others than the memory's."""
        if not self.changed:
            return None
        return {each.router.layer: each.values.cpu() for each in self.cases}

    @property
    def update_scale(self) -> dict[int, float]:
        """By layer."""
        return {
            each.router.layer: each.update_scale if self.changed else 1.0 for each in self.cases
        }

    def outcome(self) -> Outcome:
        change = self.judgement.change
        loss = self.judgement.loss
        return Outcome(self.name, loss, change.difference, change.low, change.high)

    def silenced(self) -> Trial:
        """No layer is trusted, and no value is another."""
        layers = [each.router.layer for each in self.cases]
        silent = tuple(
            replace(self.routing.for_layer(layer), confidence_factor=0.0) for layer in layers
        )
        return replace(
            self, routing=replace(self.routing, per_layer=silent), changed=False, taught=None
        )


class Teaching(NamedTuple):
    """What values learned from there on, and how fast."""

    cases: Sequence[Cases]
    rate: float


class Workbench:
    """A model, a memory's cases, and the parts of a reference set to try them on."""

    def __init__(
        self,
        model: nn.Module,
        memory: RoutingMemory,
        reference: ReferenceTokens,
        config: CalibrationConfig,
        on_progress: OnProgress,
    ) -> None:
        self.model = model
        self.memory = memory
        self.config = config
        self.parts = split(reference, config)
        self.counts = _counts(memory, config)
        self.cases: Sequence[Cases] = _cases(model, memory)
        readings = self._readings(self.parts.fitting)
        whole = len(readings) + len(self._readings(self.parts.held_out))
        passes = len(config.value_rates) * len(readings) + bool(config.value_rates) * whole
        self.steps = min(config.steps, _WIDTH_PASSES * len(readings))
        total = self.steps + (len(self.counts) - 1) * self._fewer + config.passes * passes
        self.progress = _Progress(on_progress, total)
        self.clock = Clock()
        with self.clock.on("neighbours looked up"):
            self.studied = find_neighbours(model, self.cases, readings, self.counts[-1])
        self.choosing = Baseline.of(model, self._lines(self.parts.choosing))

    def usual(self) -> Trial | None:
        """As the memory is used now, where that can be judged here: by RBF, without a gate, and not
        as these examples may have chosen before."""
        routing = self.memory.routing
        calibrated = self.memory.manifest.calibration is not None
        if calibrated or routing.similarity != "rbf" or routing.gate is not None:
            return None
        return self._trial("as it was", routing, self.cases)

    def fit_widths(self, k: int, start: Trial | None = None) -> Trial | None:
        """K cases, and the widths that make the fitted examples likeliest with them; what the
        build changed is rescaled with them, unless values are to stay. From a fit for another K
        on it takes less."""
        name = f"widths, K = {k}"
        changing = bool(self.config.value_rates)
        kept = self.memory.routing
        routing = RoutingConfig(k=k, layers=kept.layers, index=kept.index, stats=kept.stats)
        steps = self.steps if k == self.counts[-1] else self._fewer
        cases = self.cases
        if start is not None:
            routing = replace(routing, per_layer=start.routing.per_layer)
            cases = start.cases
        if changing:
            cases = [each.rescalable() for each in cases]
        try:
            with self.clock.on(name):
                widths, fitted = fit_widths(
                    self.model, cases, self.studied, routing, steps, self.progress.on(name)
                )
        except DivergedError:
            return None
        trial = self._trial(name, replace(routing, per_layer=widths), fitted)
        return trial and replace(trial, changed=changing)

    @property
    def _fewer(self) -> int:
        return -(-self.steps // 2)

    def learn_values(self, start: Trial, rate: float) -> Trial | None:
        """The same with values learned at `rate`."""
        name = f"values, rate {rate:g}"
        taught = Teaching(start.cases, rate)
        learned = self._learned(self.studied, start.routing, taught, name)
        trial = learned and self._trial(name, *learned)
        return trial and replace(trial, changed=True, taught=taught)

    def learn_from_all(self, trial: Trial) -> Trial:
        """Values, where they are learned, from the examples to choose and to judge by as well."""
        if trial.taught is None:
            return trial
        with self.clock.on("neighbours looked up"):
            more = find_neighbours(
                self.model, self.cases, self._readings(self.parts.held_out), self.counts[-1]
            )
        studied = self.studied.and_then(more)
        name = "values, from all examples"
        learned = self._learned(studied, trial.routing, trial.taught, name)
        if learned is None:  # what was judged is there still
            return trial
        return replace(trial, routing=learned[0], cases=learned[1])

    def _learned(
        self, studied: Studied, start: RoutingConfig, taught: Teaching, name: str
    ) -> tuple[RoutingConfig, list[Cases]] | None:
        how = Learning(self.config.passes, taught.rate, self.memory.build.gradient)
        try:
            with self.clock.on(name):
                widths, cases = learn_values(
                    self.model, taught.cases, studied, start, how, self.progress.on(name)
                )
        except DivergedError:
            return None
        return replace(start, per_layer=widths), cases

    @cached_property
    def judging(self) -> Baseline:
        """Of examples that have no part in anything before."""
        return Baseline.of(self.model, self._lines(self.parts.judging))

    def judge(self, trial: Trial) -> Judgement:
        with self.clock.on("judged"):
            return judge(self.model, trial.cases, self.judging, trial.routing)

    def choose_head(self, trial: Trial) -> HeadFound:
        """For a model with its memory used so."""
        parts = self.choosing, self.judging
        following = self.memory.provenance.following
        with self.clock.on("head"):
            return choose_head(self.model, trial.cases, following, trial.routing, parts)

    def distances(self, k: int) -> dict[int, Distances]:
        """To the nearest, and to the last of K cases."""
        last = min(k, self.counts[-1]) - 1
        return {
            each.router.layer: Distances(found.mean_distance(0), found.mean_distance(last))
            for each, found in zip(self.cases, self.studied.neighbours, strict=True)
        }

    def _trial(self, name: str, routing: RoutingConfig, cases: Sequence[Cases]) -> Trial | None:
        try:
            with self.clock.on("judged"):
                judged = judge(self.model, cases, self.choosing, routing)
        except DivergedError:
            return None
        return Trial(name, routing, cases, judged)

    def _readings(self, part: Slice) -> list[Reading]:
        """For a backward pass each; small enough for some steps in a pass of what is fitted."""
        fitted = self.parts.fitting
        tokens = int(fitted.reference.lengths[fitted.windows].sum())
        most = min(self.config.step_tokens, self.memory.build.batch_tokens)
        return list(part.readings(min(most, max(tokens // _STEPS_A_PASS, _LEAST_TOKENS))))

    def _lines(self, part: Slice) -> list[Reading]:
        return list(part.readings(self.memory.build.batch_tokens))


def _counts(memory: RoutingMemory, config: CalibrationConfig) -> list[int]:
    """Numbers of neighbours that every example has: of all cases but its own."""
    sizes = owners(memory.provenance)[memory.provenance.window].unique(return_counts=True)[1]
    most = len(memory) - int(sizes.max()) if len(sizes) else 0
    if most < 1:
        raise CalibrationError(
            f"{memory!r} cannot be calibrated: its examples have no others to recall."
        )
    return sorted({min(k, most) for k in config.neighbours})


def _cases(model: nn.Module, memory: RoutingMemory) -> list[Cases]:
    """Of each layer that the memory's routing has, on its router's device."""
    layers = memory.full_layers()
    for router in find_routers(model):
        if find_hook(router) is not None:
            raise CalibrationError(
                f"The model has a memory attached (at {router.name!r}): detach it to calibrate one."
            )
    everywhere = RoutingConfig(layers=memory.routing.layers)
    routers = routers_for(model, memory, everywhere, force=True)
    owner = owners(memory.provenance)[memory.provenance.window]
    where = memory.provenance
    return [Cases.of(router, layers[router.layer], owner, where) for router in routers]


class _Progress:
    def __init__(self, send: OnProgress, total: int) -> None:
        self.send = send
        self.total = total
        self.done = 0

    def on(self, what: str) -> Callable[[], None]:
        def step() -> None:
            self.done += 1
            self.send(what, self.done, self.total)

        return step
