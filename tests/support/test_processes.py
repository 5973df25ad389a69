"""A process ends with the one that started it."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Event

import pytest

from knn_moe.support.processes import end_with_parent


def work_forever(there: Connection) -> None:
    end_with_parent()
    there.send("working")
    Event().wait()


def start_worker(there: Connection) -> None:
    worker = get_context("spawn").Process(target=work_forever, args=(there,))
    worker.start()
    worker.join()


def test_a_worker_ends_with_a_parent_that_is_killed() -> None:
    """The pipe is open as long as either of them lives."""
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    parent = context.Process(target=start_worker, args=(there,))
    parent.start()
    there.close()
    assert here.recv() == "working"
    parent.kill()
    with pytest.raises(EOFError):
        here.recv()
    parent.join()
