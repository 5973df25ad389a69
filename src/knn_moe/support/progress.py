"""Report how far a long operation has come, in one form for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Progress(NamedTuple):
    """A stage of an operation, and how many of its steps are done."""

    stage: str  # what is being done, for people: "optimising", "values, rate 0.1"
    done: int
    total: int


OnProgress: TypeAlias = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Do nothing: the default of every `on_progress`."""


class StepCounter:
    """Count steps of several stages towards one total and report each of them."""

    def __init__(self, report: OnProgress, total: int) -> None:
        self.report = report
        self.total = total
        self.done = 0

    def expect(self, steps: int) -> None:
        """Raise the total where so many more steps would go beyond it."""
        self.total = max(self.total, self.done + steps)

    def steps_of(self, stage: str) -> Callable[[], None]:
        """Return the function to call after each step of `stage`."""

        def step() -> None:
            self.done += 1
            self.report(Progress(stage, self.done, self.total))

        return step
