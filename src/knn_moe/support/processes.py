"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any


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
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), begin, arguments)
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
