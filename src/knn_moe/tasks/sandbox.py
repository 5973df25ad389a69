"""Run a generated Python program in isolation, and report whether it ran to its end.

Knows processes, limits and system calls; nothing of models, tasks or what a program should compute.

The program gets a process and a folder. These layers confine it, as far as the system has them:
resource limits; an unprivileged user, if we are root; Landlock for files and a seccomp filter for
system calls; an audit hook inside the interpreter, which every system has. On Linux, a program
that gets around the hook is still stopped by the system. On other systems the hook is the main
protection: run programs that were written to break out in a container.

sandbox_child.py is the part that runs in the program's process.
"""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import selectors
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from knn_moe.errors import ConfigError
from knn_moe.tasks.sandbox_child import CHILD, GUARDS

_NOBODY: Final = 65534
_LONGEST: Final = 4096  # bytes of a report: they fit in the pipe, so no writer ever waits

# Each refused system call: its name, its number on x86_64, its number on aarch64.
_REFUSED: Final = """
    socket 41 198       socketpair 53 199   connect 42 203      accept 43 202       accept4 288 242
    bind 49 200         listen 50 201       sendto 44 206       sendmsg 46 211      sendmmsg 307 269
    recvfrom 45 207     recvmsg 47 212      fork 57 -           vfork 58 -          clone 56 220
    clone3 435 435      execve 59 221       execveat 322 281    kill 62 129         tkill 200 130
    tgkill 234 131      rt_sigaction 13 134 rt_sigqueueinfo 129 138   rt_tgsigqueueinfo 297 240
    pidfd_open 434 434  pidfd_getfd 438 438 pidfd_send_signal 424 424 ptrace 101 117
    process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272  perf_event_open 298 241
    bpf 321 280         userfaultfd 323 282 personality 135 92  unshare 272 97      setns 308 268
    mount 165 40        umount2 166 39      chroot 161 51       pivot_root 155 41
    mknod 133 -         mknodat 259 33      symlink 88 -        symlinkat 266 36
    link 86 -           linkat 265 37       name_to_handle_at 303 264  open_by_handle_at 304 265
    shmget 29 194       msgget 68 186       semget 64 190       mq_open 240 180
    add_key 248 217     request_key 249 218 keyctl 250 219      memfd_create 319 279
    io_uring_setup 425 425    io_uring_enter 426 426    io_uring_register 427 427
"""
_MACHINES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, audit arch


@dataclass(frozen=True)
class Limits:
    """The resources that a program may use."""

    seconds: float = 10.0  # of wall-clock and of CPU time, including the start of Python
    memory_mb: int = 1024  # of address space
    file_mb: int = 16  # in any one file

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"seconds must be a positive number, got {self.seconds}.")
        if self.memory_mb < 64:
            raise ConfigError(
                f"memory_mb must be at least 64, which Python itself needs, got {self.memory_mb}."
            )
        if self.file_mb < 0:
            raise ConfigError(f"file_mb must be at least 0, got {self.file_mb}.")


DEFAULT_LIMITS: Final = Limits()


@dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its end, and the reason if it did not."""

    passed: bool
    reason: str


def run_program(program: str, limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Run a program in a process of its own.

    It passes if it reaches its end; exiting early is a failure, whatever the exit status. Only the
    standard library can be imported. There are no threads, no sockets and no standard input, and
    output is discarded.

    Args:
        program: The source text.
        limits: The resources it may use.
    """
    folder = os.path.realpath(tempfile.mkdtemp(prefix="knn-moe-run-"))
    try:
        return _run_in(folder, program, limits)
    finally:
        _delete(folder)


def _run_in(folder: str, program: str, limits: Limits) -> Outcome:
    """Run `program` in `folder`, and end all its processes."""
    token = secrets.token_hex(16)
    receive, send = os.pipe()
    # The plan is in a nameless file: a pipe would block on a long program.
    with tempfile.TemporaryFile() as plan, os.fdopen(receive, "rb", buffering=0):
        try:
            plan.write(_plan(folder, program, limits, token, send))
            plan.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", CHILD],
                stdin=plan,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder},
                pass_fds=(send,),
                start_new_session=True,
            )
        finally:
            os.close(send)
        try:
            report = _listen(receive, limits.seconds)
        finally:
            # The process was not waited for yet, so the group's number is still ours.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    return _outcome(report, token, status)


def _plan(folder: str, program: str, limits: Limits, token: str, send: int) -> bytes:
    """Return the child's input. It arrives on stdin, where the program cannot read it again."""
    user = None
    if sys.platform == "linux" and os.geteuid() == 0:
        with suppress(OSError):
            os.chown(folder, _NOBODY, _NOBODY)
            user = _NOBODY
    plan = {
        "program": program,
        "guards": GUARDS,
        "token": token,
        "report": send,
        "folder": folder,
        "user": user,
        "filter": _system_call_filter().hex(),
        "seconds": math.ceil(limits.seconds),
        "memory": limits.memory_mb << 20,
        "file": limits.file_mb << 20,
    }
    return json.dumps(plan).encode("ascii")


def _listen(receive: int, seconds: float) -> bytes | None:
    """Return what the child reports before it ends, or None if it does not end in time."""
    deadline = time.monotonic() + seconds
    report = b""
    with selectors.DefaultSelector() as ready:
        ready.register(receive, selectors.EVENT_READ)
        while len(report) <= _LONGEST:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.select(left):
                return None
            piece = os.read(receive, _LONGEST)
            if not piece:
                break
            report += piece
    return report


def _outcome(report: bytes | None, token: str, status: int) -> Outcome:
    if report is None or status == -signal.SIGXCPU:
        return Outcome(False, "timed out")
    if report == token.encode():
        return Outcome(True, "passed")
    if report:
        return Outcome(False, report[:_LONGEST].decode("utf-8", "replace"))
    if status < 0:
        return Outcome(False, f"killed: {signal.Signals(-status).name}")
    return Outcome(False, "exited early")


def _delete(folder: str) -> None:
    """Delete a folder of any depth and with any permissions.

    Folders inside are emptied into the top one, so that no path grows long and nothing recurses.
    """
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                Path(entry.path).unlink()
                continue
            Path(entry.path).chmod(stat.S_IRWXU)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    Path(inner.path).chmod(stat.S_IRWXU)  # needed to move a folder
                Path(inner.path).rename(Path(folder, secrets.token_hex(8)))
            Path(entry.path).rmdir()
    Path(folder).rmdir()


def _system_call_filter() -> bytes:
    """Return a BPF program that answers EPERM to the refused calls; empty on other machines."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return b""
    column, architecture = _MACHINES[platform.machine()]
    words = _REFUSED.split()
    refused = [int(number) for number in words[1 + column :: 3] if number != "-"]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    steps = [
        (load, 0, 0, 4),  # the architecture: others have other numbers
        (equal, 1, 0, architecture),
        (give, 0, 0, 0x80000000),  # kill
        (load, 0, 0, 0),  # the call's number
        (at_least, len(refused) + 1, 0, 0x40000000),  # x32: the same calls under other numbers
        *((equal, len(refused) - place, 0, number) for place, number in enumerate(refused)),
        (give, 0, 0, 0x7FFF0000),  # allow
        (give, 0, 0, 0x00050001),  # fail with EPERM
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
