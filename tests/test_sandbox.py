"""Hostile programs harm nothing and do not pass; right ones pass; nothing is left of either."""

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

from knn_moe.errors import ConfigError
from knn_moe.tasks import sandbox
from knn_moe.tasks.sandbox import Limits, Outcome, run_program

SECRET = "a-secret-of-the-parent"
AMPLE = Limits(seconds=60, memory_mb=256)  # for programs that end by themselves
SHORT = Limits(seconds=1, memory_mb=256)


@dataclass(frozen=True)
class Outside:
    """What lies beyond a program's folder: a file anybody may write to, and a server."""

    folder: Path
    server: socket.socket

    @property
    def victim(self) -> Path:
        return self.folder / "victim.txt"

    def run(self, program: str, limits: Limits = AMPLE) -> Outcome:
        """Run a program that knows where things are; its harm would show in `outside`."""
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
    """A world that a program finds as open as can be, and must leave as it found it."""
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
    """Each layer is a wall by itself, wherever the others are missing or passed."""
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


HOSTILE = {
    "fork bomb": "import os\nfor _ in range(8): os.fork()\nwhile True: pass",
    "subprocesses": """
        import subprocess, sys
        while True: subprocess.Popen([sys.executable, "-c", "while True: pass"])
    """,
    "shell": "import os\nassert os.system(f'touch {FOLDER}/new') == 0",
    "exec": "import os\nos.execv('/bin/sh', ['sh', '-c', f'touch {FOLDER}/new'])",
    "multiprocessing": """
        import multiprocessing
        while True: multiprocessing.Process(target=print).start()
    """,
    "write by absolute path": "open(f'{FOLDER}/victim.txt', 'w').write('gone')",
    "write a new file": "open(f'{FOLDER}/new', 'w')",
    "write by dots": """
        import os
        path = os.path.relpath(f"{FOLDER}/victim.txt")
        assert path.startswith("..")
        open(path, "w")
    """,
    "write by symlink": "import os\nos.symlink(FOLDER, 'link')\nopen('link/victim.txt', 'w')",
    "write by hard link": "import os\nos.link(f'{FOLDER}/victim.txt', 'here')\nopen('here', 'w')",
    "write by os.open": "import os\nos.open(f'{FOLDER}/new'.encode(), os.O_CREAT | os.O_RDWR)",
    "write by a changing path": """
        import io
        class Path:
            calls = 0
            def __fspath__(self):
                Path.calls += 1
                return "mine" if Path.calls == 1 else f"{FOLDER}/new"
        io.FileIO(Path(), "w")
        raise ValueError
    """,
    "write beside, from below": """
        import os
        os.makedirs("a/b/c")
        here = os.open(".", os.O_RDONLY)
        up = os.path.relpath(FOLDER)
        os.chdir("a/b/c")
        os.open(f"{up}/new", os.O_CREAT | os.O_RDWR, dir_fd=here)
    """,
    "delete": "import os\nos.remove(f'{FOLDER}/victim.txt')",
    "delete a tree": "import shutil\nshutil.rmtree(FOLDER)",
    "rename": "import os\nos.rename(f'{FOLDER}/victim.txt', 'mine')",
    "truncate": "import os\nos.truncate(f'{FOLDER}/victim.txt', 0)",
    "make a folder": "import os\nos.mkdir(f'{FOLDER}/new')",
    "connect": "import socket\nsocket.create_connection(('127.0.0.1', PORT)).send(b'hello')",
    "fetch": "import urllib.request as r\nr.urlopen(f'http://127.0.0.1:{PORT}', timeout=1)",
    "listen": "import socket\nsocket.create_server(('127.0.0.1', 0))",
    "kill its parent": "import os\nos.kill(os.getppid(), 9)",
    "kill everybody": "import os\nos.kill(-1, 15)",
    "foreign functions": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.kill(os.getppid(), 9) == 0
    """,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_harm_is_refused(name: str, layers: str, outside: Outside) -> None:
    outcome = outside.run(HOSTILE[name])
    assert not outcome.passed
    assert any(word in outcome.reason for word in ("not allowed", "Error")), outcome


@pytest.mark.parametrize("name", ["fork bomb", "write a new file", "delete", "kill its parent"])
def test_an_offence_ends_a_program_that_would_go_on(name: str, outside: Outside) -> None:
    """To catch the error and do the task all the same scores nothing."""
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


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(1e6)"])
def test_endless_programs_time_out(program: str) -> None:
    assert run_program(program, SHORT) == Outcome(False, "timed out")


@pytest.mark.parametrize("how", ["print('x' * 4096)", "sys.stderr.write('x')", "os.write(1, b'x')"])
def test_endless_output_goes_nowhere(how: str) -> None:
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
def test_leaving_early_is_no_pass(program: str) -> None:
    outcome = run_program(program, AMPLE)
    assert not outcome.passed
    assert outcome.reason in ("exited early", "killed: SIGKILL")


# Whatever bytes it finds that could be the token, it sends wherever the answer could go.
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
FAKES = {
    "writes to every pipe": "send(b'passed', b'True', b'')\nos._exit(0)",
    "looks through the frames": "hunt(sys._getframe())\nos._exit(0)",
    "looks through a traceback": """
        try: open("/etc/passwd")
        except PermissionError as error:
            step = error.__traceback__
            while step: hunt(step.tb_frame); step = step.tb_next
        os._exit(0)
    """,
    "looks through memory": """
        import gc
        for value in gc.get_objects(): hunt(value) if hasattr(value, "f_back") else None
        os._exit(0)
    """,
    "reads standard input": "send(sys.stdin.buffer.read(), os.pread(0, 99, 0))\nos._exit(0)",
    "claims the end": "sys.audit('knn_moe.begin')\nsys.audit('knn_moe.end')\nos._exit(0)",
    "claims the end in its error": """
        import functools
        class Fake(Exception): __str__ = functools.partial(sys.audit, "knn_moe.end")
        raise Fake
    """,
    "claims the end at exit": """
        import atexit
        atexit.register(sys.audit, "knn_moe.end")
        sys.exit(0)
    """,
    "replays the runner": """
        import types
        runner = sys._getframe(1)
        if runner.f_code.co_name != "_child_run": raise LookupError
        types.FunctionType(runner.f_code, runner.f_globals)("pass")
        os._exit(0)
    """,
    "changes the runner's names": """
        runner = sys._getframe(1)
        for names in (runner.f_globals, runner.f_back.f_globals):
            for name in list(names):
                if name.startswith("_child"): names[name] = lambda *_: b"passed"
        raise ValueError
    """,
    "changes the builtins": """
        import builtins
        for name in ("type", "isinstance", "str", "BaseException", "SystemExit", "PermissionError"):
            setattr(builtins, name, lambda *_: hunt(sys._getframe()) or True)
        try: os.mkdir("new"); open("new/file", "w")
        finally: os._exit(0)
    """,
    "changes the modules": """
        os.write = os._exit = sys.exit = sys.audit = lambda *_: send(b"passed")
        sys.modules.clear()
        raise ValueError
    """,
    "traces the runner": """
        sys.settrace(lambda *_: None)
        os._exit(0)
    """,
    "equals everything": """
        class Always:
            def __eq__(self, other): return True
            def __hash__(self): hunt(sys._getframe()); return 0
        sys.audit("import", Always())
        os._exit(0)
    """,
    "stops its guards": "sys.addaudithook(lambda *_: 1 / 0)\nos._exit(0)",
}


@pytest.mark.parametrize("name", FAKES)
def test_a_pass_cannot_be_faked(name: str) -> None:
    outcome = run_program(SEND + dedent(FAKES[name]), AMPLE)
    assert not outcome.passed
    assert "LookupError" not in outcome.reason  # the fake itself must be one that works


def test_the_end_is_the_programs_last_line() -> None:
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
def test_the_reason_says_what_went_wrong(program: str, reason: str) -> None:
    outcome = run_program(program, AMPLE)
    assert not outcome.passed
    assert outcome.reason.startswith(tuple(reason.split("|"))), outcome


def test_a_reason_is_short() -> None:
    assert len(run_program("raise ValueError('x' * 10**6)", AMPLE).reason) == 500


RIGHT = {
    "empty": "",
    "comment": "# nothing",
    "long": "x = 1\n" * 50_000,
    "library": """
        import bisect, collections, copy, csv, datetime, decimal, enum, fractions, functools
        import hashlib, heapq, io, itertools, json, logging, math, operator, os, pathlib, random
        import re, shutil, statistics, string, struct, subprocess, sys, tempfile, threading, time
        import typing, unittest, uuid, zlib
        assert json.loads(json.dumps({"a": [1.5, None]})) == {"a": [1.5, None]}
        assert re.findall(r"\\d+", "a1b22") == ["1", "22"]
        assert hashlib.sha256(b"").hexdigest().startswith("e3b0c442")
        assert datetime.date(2024, 2, 29).strftime("%d.%m.%Y") == "29.02.2024"
        assert "é".encode("latin-1").decode("cp1252") == "é"
        assert uuid.uuid4() != uuid.uuid4() and os.urandom(4)
    """,
    "classes": """
        from __future__ import annotations
        import dataclasses, pickle, typing
        @dataclasses.dataclass
        class Point:
            x: int
            y: typing.ClassVar[int] = 1
        Pair = typing.NamedTuple("Pair", [("a", int)])
        assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
        assert typing.get_type_hints(Point)["x"] is int and Pair(1).a == 1
        assert __name__ == "__main__"
    """,
    "recursion": """
        import sys
        sys.setrecursionlimit(5000)
        def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
        assert depth(3000) == 3000
        def endless(): return endless()
        try: endless()
        except RecursionError: pass
    """,
    "files": """
        import os, pathlib, shutil, sys, tempfile
        with open("a.txt", "w") as file: file.write("é")
        assert open(os.path.join(os.getcwd(), "a.txt")).read() == "é"
        os.makedirs("b/c"); pathlib.Path("b/c/d").write_bytes(b"1"); os.rename("a.txt", "b/a")
        assert sorted(os.listdir("b")) == ["a", "c"] and os.path.expanduser("~") == os.getcwd()
        with tempfile.TemporaryDirectory() as folder: open(f"{folder}/x", "w").close()
        shutil.rmtree("b")
        print("told to nobody", file=open(os.devnull, "w")); print("é"); sys.stderr.write("x")
    """,
    "output": """
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()) as out: print("hello")
        assert out.getvalue() == "hello\\n"
    """,
    "own exit": "try: raise SystemExit(1)\nexcept SystemExit: pass",
    "test suite": """
        import io, unittest
        class Case(unittest.TestCase):
            def test_sum(self): self.assertEqual(1 + 1, 2)
        cases = unittest.defaultTestLoader.loadTestsFromTestCase(Case)
        assert unittest.TextTestRunner(stream=io.StringIO()).run(cases).wasSuccessful()
    """,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(name: str, layers: str) -> None:
    assert run_program(dedent(RIGHT[name]), AMPLE) == Outcome(True, "passed")


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
    ("settings", "message"),
    [
        ({"seconds": 0.0}, "seconds must be a positive number, got 0.0."),
        ({"seconds": float("nan")}, "seconds must be a positive number, got nan."),
        ({"seconds": float("inf")}, "seconds must be a positive number, got inf."),
        ({"memory_mb": 63}, "memory_mb must be at least 64, which Python itself needs, got 63."),
        ({"file_mb": -1}, "file_mb must be at least 0, got -1."),
    ],
)
def test_limits_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Limits(**settings)
    assert str(error.value) == message
