"""Search for the best way to use a memory: widths, rates of training, fewer neighbours, and a reach
that is no wider than it must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from knn_moe.adapt.calibrate.result import TrialSummary
from knn_moe.adapt.calibrate.trials import Calibrator, Trial
from knn_moe.errors import CalibrationError

_ENOUGH: Final = 0.98  # share of the best gain at which fewer neighbours are preferred
_KEPT: Final = 0.95  # share of it that a narrower reach must keep
_NARROWER: Final = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # what the γ of λ is multiplied by


def no_finite_loss() -> CalibrationError:
    """Return the error of a memory that cannot be used at all."""
    return CalibrationError(
        "No way to use this memory gave the model a finite loss: its values or the model may "
        "overflow. Build it with smaller steps, or use another dtype."
    )


def climb(rates: Sequence[float], loss_at: Callable[[float], float]) -> None:
    """Go from the middle rate to better neighbours until there is none; lower ones first.

    `rates` ascend. `loss_at` is called once for each rate that is tried.
    """
    loss_of = cache(loss_at)
    place = (len(rates) - 1) // 2
    while True:
        loss = loss_of(rates[place])
        near = [rates[at] for at in (place - 1, place + 1) if 0 <= at < len(rates)]
        better = next((rate for rate in near if loss_of(rate) < loss), None)
        if better is None:
            return
        place = rates.index(better)


class Search:
    """The trials of one memory: the best so far, and the numbers of all of them.

    Only the best trial is kept: each holds values as large as the memory's.
    """

    def __init__(self, calibrator: Calibrator) -> None:
        self.calibrator = calibrator
        self.summaries: list[TrialSummary] = []
        self.rates = sorted(calibrator.config.value_rates)
        self._best: Trial | None = None
        self._begun = False
        self._widths: Trial | None = None  # the fit from which values are trained

    @property
    def best(self) -> Trial:
        """The best trial.

        Raises:
            CalibrationError: There is none.
        """
        if self._best is None:
            raise no_finite_loss()
        return self._best

    @property
    def has_trial(self) -> bool:
        """Whether there is a trial with a finite loss."""
        return self._best is not None

    def begin(self) -> None:
        """Make the first trial, by which memories can be compared: widths for the largest K."""
        if not self._begun:
            self._begun = True
            self._widths = self.calibrator.try_widths(self.calibrator.ks[-1])
            self._offer(self._widths)

    def run(self) -> None:
        """Make all trials: also at other rates, with fewer neighbours, the memory unchanged, and
        the best of them with a narrower reach."""
        self.begin()
        if self.rates:
            climb(self.rates, self._loss_at)
        self._try_fewer_neighbours()
        self._offer(self.calibrator.try_unchanged())
        self._narrow()

    def _loss_at(self, rate: float) -> float:
        trial = self._train(self.calibrator.ks[-1], rate)
        self._offer(trial)
        return trial.judgement.loss if trial else math.inf

    def _train(self, k: int, rate: float) -> Trial | None:
        return self._widths and self.calibrator.try_values(self._widths, k, rate)

    def _try_fewer_neighbours(self) -> None:
        """Fit again for each smaller K; take it where it has nearly all of the gain."""
        training = self._best.training if self._best else None
        for k in reversed(self.calibrator.ks[:-1]):
            if training is not None:
                trial = self._train(k, training.rate)
            else:
                trial = self.calibrator.try_widths(k, self._widths)
            self._offer(trial, share=_ENOUGH)

    def _narrow(self) -> None:
        """Narrow the reach of the best trial as far as it keeps most of its gain.

        A wide reach gains little more on text like the reference set, and harms other text.
        """
        widest = self._best
        if widest is None or _gain(widest) <= 0:
            return
        for factor in _NARROWER:
            trial = self.calibrator.try_narrower(widest, factor)
            if trial is None or _gain(trial) < _KEPT * _gain(widest):
                return
            self.summaries.append(trial.summary())
            self._best = trial

    def _offer(self, trial: Trial | None, share: float = 1.0) -> None:
        """Take a trial if it gains more than `share` of what the best one gains."""
        if trial is None:
            return
        self.summaries.append(trial.summary())
        if self._best is not None:
            gain, best = _gain(trial), _gain(self._best)
            if gain <= (best * share if best > 0 else best):
                return
        self._best = trial


def _gain(trial: Trial) -> float:
    """Return how much lower the loss is than that of the model alone."""
    return -trial.judgement.change.difference
