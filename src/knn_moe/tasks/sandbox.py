"""Run a generated Python program in a confined process, and report whether it passed its tests.

This protects against accidents: a program that fills memory, starts processes, deletes files or
never ends. It does not protect against a program that is written to attack the system, or to forge
its own verdict: it shares an interpreter with its tests.

Programs run only with consent (`allow_programs`, or the environment variable KNN_MOE_RUN_CODE).
"""

from __future__ import annotations

import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from knn_moe.errors import ConfigError, ProgramError
from knn_moe.tasks import confinement
from knn_moe.tasks.confinement import Confinement
from knn_moe.tasks.task import Task

CONSENT: Final = "KNN_MOE_RUN_CODE"
_CONFINED, _UNCONFINED = "1", "unconfined"  # its values

_CHILD: Final = Path(__file__).with_name("sandbox_child.py")
_READY: Final = b"ready\n"
_LONGEST_START: Final = 60.0  # seconds
_LONGEST_REPORT: Final = 4096  # bytes


@dataclass(frozen=True)
class Limits:
    """The resources that a program may use."""

    seconds: float = 10.0  # of wall-clock time, and of CPU time in each process
    memory_mb: int = 1024  # of address space in each process
    file_mb: int = 16  # in all files together; in each one if it is not confined
    processes: int = 32  # and threads; none if it is not confined

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"seconds must be a positive number, got {self.seconds}.")
        if self.memory_mb < 64:
            raise ConfigError(
                f"memory_mb must be at least 64, which Python itself needs, got {self.memory_mb}."
            )
        for name in ("file_mb", "processes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def as_plan(self, *, confined: bool) -> dict[str, int]:
        """Return the limits by their names in the module `resource`."""
        return {
            "RLIMIT_CPU": math.ceil(self.seconds),
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": self.file_mb << 20,
            # The limit counts all processes of a user, who has others outside of a confinement.
            "RLIMIT_NPROC": self.processes if confined else 0,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
        }


DEFAULT_LIMITS: Final = Limits()


@dataclass(frozen=True)
class Outcome:
    """Whether a program passed its tests, and the reason if it did not."""

    passed: bool
    reason: str


@contextmanager
def allow_programs(*, unconfined: bool = False) -> Iterator[None]:
    """Consent to running generated programs, in this process and those that it starts.

    Args:
        unconfined: Also where they cannot be confined.
    """
    before = os.environ.get(CONSENT)
    # Consent that was given already is not reduced.
    os.environ[CONSENT] = _UNCONFINED if unconfined or before == _UNCONFINED else _CONFINED
    try:
        yield
    finally:
        os.environ.pop(CONSENT)
        if before is not None:
            os.environ[CONSENT] = before


def check_programs(tasks: Iterable[Task]) -> None:
    """Refuse tasks that run generated programs where that is not allowed or not possible.

    Raises:
        ProgramError: There is no consent, or no way to confine programs.
    """
    for task in tasks:
        if getattr(task.kind, "runs_programs", False):
            _choose_confinement(repr(task.name))


def _choose_confinement(what: str) -> Confinement:
    given = os.environ.get(CONSENT, "")
    if given not in (_CONFINED, _UNCONFINED):
        raise ProgramError(
            f"{what} runs programs that the model writes. Agree to that with --run-code, or with "
            f"{CONSENT}={_CONFINED} in the environment (now: {given!r})."
        )
    try:
        return confinement.find_confinement()
    except ProgramError:
        if given == _CONFINED:
            raise
        return confinement.UNCONFINED


def run_program(program: str, tests: str = "", limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Run a program and then its tests, in a process of their own.

    It passes if the last test ends; exiting early is a failure, whatever the exit status. The tests
    see the program's names. Blocks under `if __name__ == "__main__"` do not run. Only the standard
    library can be imported; there is no standard input, and output is discarded.

    Raises:
        ProgramError: Programs may not run, cannot be confined, or the confinement does not start.
    """
    chosen = _choose_confinement("This")
    nonce = secrets.token_hex(16).encode()
    rules = limits.as_plan(confined=chosen.confines)
    plan = json.dumps({"program": program, "tests": tests, "limits": rules})
    # The plan is in a file without a name: a pipe would block on a long program.
    with tempfile.TemporaryFile() as stdin, _make_folder(chosen) as folder:
        stdin.write(nonce + plan.encode("ascii"))
        stdin.seek(0)
        report = _run(chosen.command(limits.file_mb), stdin.fileno(), folder, limits.seconds)
    return _judge(report, nonce, chosen)


def _make_folder(chosen: Confinement) -> AbstractContextManager[str | None]:
    """Return a folder for a program that is not confined: others have a private /tmp."""
    if chosen.confines:
        return nullcontext()
    return tempfile.TemporaryDirectory(prefix="knn-moe-run-", ignore_cleanup_errors=True)


def _run(before: list[str], stdin: int, folder: str | None, seconds: float) -> bytes | None:
    """Return what the process reports, or None if it takes too long; end all its processes."""
    python = [confinement.PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", _CHILD.read_text("utf8")]
    process = subprocess.Popen(
        [*before, *python],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=confinement.ENVIRONMENT | ({"HOME": folder, "TMPDIR": folder} if folder else {}),
        start_new_session=True,
    )
    with process:
        try:
            return _listen(process, seconds)
        finally:
            # It was not waited for yet, so the group's number is still ours.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _listen(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Return the report up to the line after _READY; None if that does not come in time."""
    assert process.stdout is not None  # it is a pipe
    report, started = b"", False
    deadline = time.monotonic() + _LONGEST_START
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while len(report) <= _LONGEST_REPORT:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.select(left):
                return None if started else report
            piece = os.read(process.stdout.fileno(), _LONGEST_REPORT)
            report += piece
            if not started and _READY in report:
                started, deadline = True, time.monotonic() + seconds
            if not piece or report.partition(_READY)[2].endswith(b"\n"):
                break
    return report


def _judge(report: bytes | None, nonce: bytes, chosen: Confinement) -> Outcome:
    if report is None:
        return Outcome(False, "timed out")
    before, ready, verdict = report.partition(_READY)
    if not ready:
        said = before.decode("utf8", "replace").strip() or "it said nothing"
        raise ProgramError(f"A program could not be started ({chosen.name}): {said}.")
    if verdict == nonce + b"\n":
        return Outcome(True, "passed")
    text = verdict[:_LONGEST_REPORT].decode("utf8", "replace").strip()
    return Outcome(False, text or "killed, or exited early")
