"""Hostile programs do no harm and do not pass; right ones pass; neither leaves anything behind."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from helpers.programs import FAKES, HOSTILE, RIGHT
from knn_moe.errors import ConfigError
from knn_moe.tasks import sandbox
from knn_moe.tasks.sandbox import Limits, Outcome, run_program

SECRET = "a-secret-of-the-parent"
AMPLE = Limits(seconds=60, memory_mb=256)  # for programs that end by themselves
SHORT = Limits(seconds=1, memory_mb=256)


@dataclass(frozen=True)
class Outside:
    """What is outside a program's folder: a file that anybody may write to, and a server."""

    folder: Path
    server: socket.socket

    @property
    def victim(self) -> Path:
        return self.folder / "victim.txt"

    def run(self, program: str, limits: Limits = AMPLE) -> Outcome:
        """Run a program that knows where these are."""
        known = {"FOLDER": str(self.folder), "PORT": self.server.getsockname()[1]}
        lines = [f"{name} = {value!r}" for name, value in known.items()]
        return run_program("\n".join([*lines, dedent(program)]), limits)


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No folder and no process outlives a run."""
    started: list[int] = []
    start = subprocess.Popen.__init__

    def recorded(self: subprocess.Popen[bytes], *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        started.append(self.pid)

    folder = tempfile.mkdtemp(prefix="sandbox-test-")
    Path(folder).chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setattr(subprocess.Popen, "__init__", recorded)
    yield
    Path(folder).rmdir()  # fails if it is not empty
    for group in started:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    """A file and a server that are open to everybody, and must be untouched afterwards."""
    monkeypatch.setenv("PARENT_SECRET", SECRET)
    folder = Path(tempfile.mkdtemp(prefix="sandbox-outside-", dir="/tmp"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        world = Outside(folder, server)
        world.victim.write_text(SECRET)
        folder.chmod(0o777)
        world.victim.chmod(0o666)
        yield world
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [path.name for path in folder.iterdir()] == ["victim.txt"]
    assert world.victim.read_text() == SECRET
    assert world.victim.stat().st_mode & 0o777 == 0o666
    shutil.rmtree(folder)


@pytest.fixture(params=["all layers", "hooks alone", "kernel alone"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every layer must suffice on its own, where the others are missing or evaded."""
    if request.param == "hooks alone":
        bare = sandbox.CHILD.replace("\n_child()\n", "\n_child_ask_kernel = print\n_child()\n")
        monkeypatch.setattr(sandbox, "CHILD", bare)
        monkeypatch.setattr(os, "geteuid", lambda: 1)
    if request.param == "kernel alone":
        if not has_kernel_layers():
            pytest.skip("this system has no Landlock, or no filter for its machine")
        idle = "\n_guard_offences = lambda folder: lambda event, args: None\n_guard_reads = print\n"
        monkeypatch.setattr(sandbox, "GUARDS", sandbox.GUARDS + idle)
    return str(request.param)


def has_kernel_layers() -> bool:
    if not sandbox._system_call_filter():
        return False
    return bool(ctypes.CDLL(None).syscall(444, None, 0, 1) > 0)


@pytest.mark.parametrize("name", HOSTILE)
def test_harm_is_refused(name: str, layers: str, outside: Outside) -> None:
    outcome = outside.run(HOSTILE[name])
    assert not outcome.passed
    assert any(word in outcome.reason for word in ("not allowed", "Error")), outcome


@pytest.mark.parametrize("name", ["fork bomb", "write a new file", "delete", "kill its parent"])
def test_an_offence_ends_a_program_that_catches_it(name: str, outside: Outside) -> None:
    """A program that catches the error does not pass either."""
    tried = "".join(f"    {line}\n" for line in HOSTILE[name].splitlines())
    outcome = outside.run(f"try:\n{tried}except BaseException: pass\n")
    assert outcome.reason.startswith("not allowed: ")


@pytest.mark.parametrize(
    "program",
    [
        "raise ValueError(open(f'{FOLDER}/victim.txt').read())",
        "import os\nraise ValueError(os.read(os.open(f'{FOLDER}/victim.txt', os.O_RDONLY), 99))",
        "import os\nraise ValueError(os.listdir(FOLDER))",
        "raise ValueError(open('/etc/passwd').read())",
        "import os\nraise ValueError(open(f'/proc/{os.getppid()}/environ').read())",
        "import os\nraise ValueError(open(f'/proc/{os.getppid()}/cmdline').read())",
        "raise ValueError(open('/proc/self/environ').read())",
    ],
)
def test_nothing_outside_can_be_read(program: str, layers: str, outside: Outside) -> None:
    outcome = outside.run(program)
    assert not outcome.passed
    assert outcome.reason.startswith("PermissionError"), outcome


def test_the_environment_is_empty(outside: Outside) -> None:
    outcome = outside.run("import os\nraise ValueError(sorted(os.environ))")
    assert not outcome.passed
    # Python itself sets the last one.
    assert set(outcome.reason.split("'")[1::2]) <= {"HOME", "TMPDIR", "LC_CTYPE"}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(1e6)"])
def test_endless_programs_time_out(program: str) -> None:
    assert run_program(program, SHORT) == Outcome(False, "timed out")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["print('x' * 4096)", "sys.stderr.write('x')", "os.write(1, b'x')"])
def test_endless_output_is_discarded(how: str) -> None:
    outcome = run_program(f"import os, sys\nwhile True: {how}", SHORT)
    assert outcome == Outcome(False, "timed out")


def test_memory_is_bounded() -> None:
    hoard = "kept = []\nwhile True: kept.append(bytearray(1 << 20))"
    assert run_program(hoard, AMPLE) == Outcome(False, "MemoryError")
    assert not run_program("x = 'x' * (1 << 40)", AMPLE).passed


def test_files_are_bounded() -> None:
    limits = Limits(seconds=60, file_mb=1)
    outcome = run_program("open('big', 'wb').write(bytes(2 << 20))\nopen('big').seek(0)", limits)
    assert "File too large" in outcome.reason
    many = "for name in range(10**6): open(str(name), 'wb').write(bytes(1 << 10))"
    assert run_program(many, limits) == Outcome(False, "not allowed: so many files")
    many = "import os\nfor name in range(10**6): os.mkdir(str(name))"
    assert run_program(many, limits) == Outcome(False, "not allowed: so many files")


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 10**9])
def test_deep_recursion_ends(limit: int | None) -> None:
    deep = "import sys\ndef f(x): return f([x]) and repr(x)\n"
    outcome = run_program(
        f"{deep}{f'sys.setrecursionlimit({limit})' if limit else ''}\nf(0)", SHORT
    )
    assert not outcome.passed


def test_signals_cannot_be_caught_nor_limits_raised(outside: Outside) -> None:
    if has_kernel_layers():
        outcome = outside.run("import signal\nsignal.signal(signal.SIGXCPU, print)")
        assert outcome.reason.startswith("PermissionError")
    outcome = outside.run("import resource as r\nr.setrlimit(r.RLIMIT_CPU, (99, 99))")
    assert outcome == Outcome(False, "not allowed: resource.setrlimit")


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import sys\nsys.exit()",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "import os, atexit\natexit.register(print)\nos.closerange(3, 64)\nos._exit(0)",
    ],
)
def test_exiting_early_does_not_pass(program: str) -> None:
    outcome = run_program(program, AMPLE)
    assert not outcome.passed
    assert outcome.reason in ("exited early", "killed: SIGKILL")


# Sends all bytes that could be the token to all files that could be the report.
SEND = """
import os, sys
def send(*found):
    for fd in range(3, 64):
        for value in found:
            try: os.write(fd, value)
            except OSError: pass
def hunt(frame, depth=0):
    values = []
    while frame:
        values += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for value in list(values):
        values += value.values() if type(value) is dict else ()
        values += value if type(value) in (list, tuple) else ()
    for value in values:
        if type(value) is str and len(value) == 32: send(value.encode())
        if type(value) is bytes and len(value) == 32: send(value)
"""


@pytest.mark.parametrize("name", FAKES)
def test_a_pass_cannot_be_faked(name: str) -> None:
    outcome = run_program(SEND + dedent(FAKES[name]), AMPLE)
    assert not outcome.passed
    assert "LookupError" not in outcome.reason  # the fake itself must work


def test_a_program_passes_at_its_last_line() -> None:
    assert run_program(SEND, AMPLE).passed
    assert not run_program("def f():\n    raise ValueError\nf()", AMPLE).passed


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 + 1 == 3, 'sums are wrong'", "AssertionError: sums are wrong"),
        ("assert False", "AssertionError"),
        ("raise KeyError('é \\udc80 \\x00')", "KeyError: "),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(:", "SyntaxError: "),
        ("x = 1\x00", "SyntaxError: |ValueError: "),
        ("x = '\udc80'", "UnicodeEncodeError: "),
        ("x = " + "(" * 10_000, "SyntaxError: |MemoryError"),
        ("import torch", "ModuleNotFoundError: No module named 'torch'"),
        ("input()", "EOFError: "),
        ("exit_code = 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_the_reason_names_the_error(program: str, reason: str) -> None:
    outcome = run_program(program, AMPLE)
    assert not outcome.passed
    assert outcome.reason.startswith(tuple(reason.split("|"))), outcome


def test_a_reason_is_short() -> None:
    assert len(run_program("raise ValueError('x' * 10**6)", AMPLE).reason) == 500


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(name: str, layers: str) -> None:
    assert run_program(dedent(RIGHT[name]), AMPLE) == Outcome(True, "passed")


@pytest.mark.slow
def test_a_folder_left_deep_and_closed_is_deleted() -> None:
    program = "import os\nos.makedirs('a/' * 90)\nopen('a/x', 'w')\nos.chmod('a/x', 0)\n"
    assert run_program(program + "os.chmod('a/a', 0)\nos.chmod('a', 0)", AMPLE).passed
    deep = folder = Path(tempfile.mkdtemp())
    for _ in range(sys.getrecursionlimit() + 100):
        deep = deep / "a"
        deep.mkdir()
    (folder / "link").symlink_to("/")
    sandbox._delete(str(folder))
    assert not folder.exists()


def test_many_runs_leave_nothing_open() -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    for program in ("", "1 / 0", "import os\nos._exit(3)") * 5:
        run_program(program, AMPLE)
    assert len(list(Path("/dev/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"seconds": 0.0}, "seconds must be a positive number, got 0.0."),
        ({"seconds": float("nan")}, "seconds must be a positive number, got nan."),
        ({"seconds": float("inf")}, "seconds must be a positive number, got inf."),
        ({"memory_mb": 63}, "memory_mb must be at least 64, which Python itself needs, got 63."),
        ({"file_mb": -1}, "file_mb must be at least 0, got -1."),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Limits(**limits)
    assert str(error.value) == message
