"""Processes end with the one that started them, at once when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event

import pytest

from knn_moe.support.processes import end_with_parent

# Two processes that never end by themselves; their ids are printed when both are at work.
ENDLESS = """
import signal
from concurrent.futures import wait
from multiprocessing import active_children
from knn_moe.support.processes import end_with_parent, process_pool

if __name__ == "__main__":
    with process_pool(2, end_with_parent) as pool:
        endless = [pool.submit(signal.pause) for _ in range(3)]
        while sum(each.running() for each in endless) < 2:
            wait(endless, timeout=0.01)
        print(*(child.pid for child in active_children()), flush=True)
        wait(endless)
"""


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


@pytest.mark.slow
def test_a_pool_ends_when_its_parent_alone_is_interrupted(tmp_path: Path) -> None:
    """A terminal would interrupt the children too; `kill -INT` does not."""
    program = tmp_path / "program.py"
    program.write_text(ENDLESS, encoding="utf8")
    command = [sys.executable, str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        try:
            assert parent.stdout is not None
            assert len(parent.stdout.readline().split()) == 2
            os.kill(parent.pid, signal.SIGINT)
            assert parent.wait(timeout=20) != 0
            # The pipe is open until its last holder has ended.
            assert parent.stdout.read() == b""
        finally:
            parent.kill()
