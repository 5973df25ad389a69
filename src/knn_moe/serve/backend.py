"""What runs jobs: many at once (batches.py), or one at a time (one_by_one.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from knn_moe.serve.jobs import Job
from knn_moe.serve.sampling import Token


class Listener(Protocol):
    """Who hears of jobs, in the threads that run them."""

    def on_token(self, job: Job, token: Token) -> None:
        """A token was drawn."""

    def on_end(self, job: Job, error: str | None) -> None:
        """A job has ended. For one that was cancelled this is not called."""

    def on_failure(self, error: str) -> None:
        """Nothing runs any more, and nothing will."""


class Backend(Protocol):
    """Runs jobs in a thread of its own."""

    at_once: int  # jobs that run at the same time
    context: int  # the most tokens that a job may read

    def start(self) -> None:
        """Begin to run jobs."""

    def run(self, job: Job) -> None:
        """Begin a job."""

    def cancel(self, job: Job) -> None:
        """End a job soon, without a word."""

    def pause(self) -> AbstractContextManager[None]:
        """Keep the model from running inside, so that it may be changed."""

    def whole_passes(self) -> AbstractContextManager[None]:
        """Keep the model from running jobs inside, so that any thread may run whole passes over
        single sequences."""

    def stop(self, timeout: float | None) -> None:
        """End soon, whatever runs."""
