"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from threading import Thread
from typing import Any


class _DeafProcess(SpawnProcess):
    """A process that never receives Ctrl-C: the one that started it hears it, and ends both."""

    def start(self) -> None:
        """Start with SIGINT blocked, which is inherited, so that it never has a handler to run."""
        ensure_running()  # would unblock it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(SpawnContext):
    Process = _DeafProcess


@contextmanager
def process_pool(
    jobs: int, begin: Callable[..., None], *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Start processes on demand; after an exception, Ctrl-C included, kill them at once.

    Args:
        jobs: The number of processes.
        begin: Called in each process before its first task, with `arguments`. It should call
            `end_with_parent`.
        arguments: What `begin` is called with; picklable.
    """
    pool = ProcessPoolExecutor(jobs, _Context(), begin, arguments)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
        raise
    pool.shutdown()


def end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed."""

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=wait, daemon=True).start()
