"""Kill jobs at random moments, then repeat or resume them.

A job is killed at a random file operation, or after a random time. What is under the output's name
must then be what was there before or what the job makes, whole; and the job that is started again
must end with the files of a job that was never killed, and leave nothing else.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from campaigns.jobs import Inputs, Job, digest_folder, make_jobs, run_apart
from campaigns.tally import Tally
from knn_moe import RoutingMemory

# Of one thread's work on files. Writes to open files are none, so half of the kills are by time.
_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.scandir")
_PATIENCE = 120.0  # seconds, for jobs of less than two


def run(count: int, seed: int, scratch: Path) -> Tally:
    """Kill `count` jobs, of every kind in turn."""
    tally, draw = Tally("kills"), random.Random(seed)
    inputs = scratch / "inputs"
    inputs.mkdir()
    runs = [Expected(job, scratch) for job in make_jobs(Inputs(inputs))]
    for number in range(count):
        expected = runs[number % len(runs)]
        folder = scratch / "work"
        harm = _kill_and_repeat(expected, folder, draw)
        if harm is None:
            tally.passed(expected.job.name)
        else:
            tally.failed(expected.job.name, harm)
        shutil.rmtree(folder, ignore_errors=True)
    return tally


class Expected:
    """A job, its output before and after, and how long it takes, in file operations and seconds."""

    def __init__(self, job: Job, scratch: Path) -> None:
        self.job = job
        folder, counter = scratch / "expected", scratch / "events"
        prepare(job, folder)
        self.before = digest_folder(folder / job.output)
        began = time.monotonic()

        def count_events() -> None:
            events = watch(folder, None)
            try:
                job.start(folder)
            finally:
                counter.write_text(str(events[0]))

        code = wait(run_apart(count_events, scratch / "log"))
        if code:
            raise RuntimeError(f"{job.name} fails: {(scratch / 'log').read_text()}")
        self.seconds = time.monotonic() - began
        self.events = int(counter.read_text())
        self.after = digest_folder(folder / job.output)
        shutil.rmtree(folder)


def _kill_and_repeat(expected: Expected, folder: Path, draw: random.Random) -> str | None:
    """Kill a job once or twice and let it end; return what went wrong."""
    job = expected.job
    prepare(job, folder)
    action: Callable[[Path], None] = job.start
    for _ in range(draw.choice((1, 1, 2))):
        _kill(expected, action, folder, draw)
        action = job.again
        harm = check_whole(expected, folder)
        if harm:
            return f"after the kill: {harm}"
    log = folder.with_name("log")
    code = wait(run_apart(lambda: job.again(folder), log))
    found = digest_folder(folder / job.output)
    if found != expected.after:
        return f"after the second run (exit code {code}): {log.read_text()[-300:]}"
    if code not in (0, 2):  # 2: it was done already, and says so
        return f"exit code {code}: {log.read_text()[-300:]}"
    left = sorted(path.name for path in folder.iterdir() if path.name != job.output)
    if left and code == 0:
        return f"left behind: {left}"
    return None


def check_whole(expected: Expected, folder: Path) -> str | None:
    """Return what is wrong with the output after a kill: a memory must be the old or the new."""
    output = folder / expected.job.output
    if expected.job.output != "memory":
        return None
    if not output.exists():
        return "there is no memory any more" if expected.before else None
    try:
        RoutingMemory.from_pretrained(output)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found = digest_folder(output)
    return None if found in (expected.before, expected.after) else "neither the old nor the new"


def prepare(job: Job, folder: Path) -> None:
    """Make the folder of a job and put its inputs there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    job.prepare(folder)


def _kill(
    expected: Expected, action: Callable[[Path], None], folder: Path, draw: random.Random
) -> None:
    at_event = draw.randint(1, max(expected.events, 1)) if draw.random() < 0.5 else None
    seconds = draw.uniform(0, expected.seconds)

    def work() -> None:
        watch(folder, at_event)
        action(folder)

    process = run_apart(work, folder.with_name("log"))
    if at_event is None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    wait(process)


def watch(folder: Path, at_event: int | None, signal_number: int = signal.SIGKILL) -> list[int]:
    """Count this process's operations on files below `folder`, and send it a signal at number
    `at_event`."""
    seen, beginning = [0], str(folder)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _EVENTS and arguments and str(arguments[0]).startswith(beginning):
            seen[0] += 1
            if seen[0] == at_event:
                os.kill(os.getpid(), signal_number)

    sys.addaudithook(hook)
    return seen


def wait(process: int) -> int:
    """Wait for a process and return its exit code; one that hangs is killed."""
    give_up = time.monotonic() + _PATIENCE
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > give_up:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
