"""Programs run only with consent, confined; harm stays inside, and right ones pass.

The campaign `programs` runs every program of helpers/programs.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import knn_moe
from helpers.programs import RIGHT, RIGHT_ADD, TESTS
from knn_moe.errors import ConfigError, ProgramError
from knn_moe.tasks import Task, allow_programs, confinement
from knn_moe.tasks.confinement import CONFINEMENTS, Confinement, find_confinement, try_out
from knn_moe.tasks.kinds import Choice, Program
from knn_moe.tasks.sandbox import CONSENT, Limits, Outcome, check_programs, run_program

AMPLE = Limits(seconds=60, memory_mb=256)  # for programs that end by themselves
SHORT = Limits(seconds=0.5, memory_mb=256)
MBPP = Task(name="mbpp", title="MBPP", kind=Program(), files="mbpp")


@pytest.fixture(autouse=True)
def _no_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONSENT, raising=False)


@pytest.fixture(params=CONFINEMENTS, ids=lambda each: each.name)
def confined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run programs in each confinement that this machine has."""
    chosen: Confinement = request.param
    reason = try_out(chosen)
    if reason is not None:
        pytest.skip(f"{chosen.name}: {reason}")
    monkeypatch.setattr(confinement, "find_confinement", lambda: chosen)
    with allow_programs():
        yield chosen.name


@pytest.fixture
def unconfined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Run programs where nothing confines them; yield the folder of temporary files."""
    monkeypatch.setattr(confinement, "CONFINEMENTS", ())
    find_confinement.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with allow_programs(unconfined=True):
        yield tmp_path
    find_confinement.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(name: str, confined: str) -> None:
    outcome = run_program(f"{dedent(RIGHT[name]).lstrip()}\n{RIGHT_ADD}", TESTS, AMPLE)
    assert outcome == Outcome(True, "passed")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("", "NameError: name 'add' is not defined"),
        ("def add(a, b): return a - b", "AssertionError"),
        ("raise KeyError('é \\udc80 \\x00\\n')", "KeyError: "),
        ("def f(:", "SyntaxError: "),
        ("input()", "EOFError: "),
        ("import sys\nsys.exit(0)", "exited early"),
        ("import os\nos._exit(0)", "killed, or exited early"),
        ("import os\nos.kill(os.getpid(), 9)", "killed, or exited early"),
        ("import torch", "ModuleNotFoundError: No module named 'torch'"),
        ("x = 'x' * (1 << 40)", "MemoryError"),
        ("open('x', 'wb').write(bytes(32 << 20))", "OSError: "),
        ("open('/usr/x', 'w')", "OSError: [Errno 30] Read-only file system"),
        ("open('/etc/passwd')", "FileNotFoundError: "),
        ("open('/proc/1/environ')", "FileNotFoundError: "),
        ("import socket\nsocket.create_connection(('192.0.2.1', 9))", "OSError: [Errno 101]"),
    ],
)
def test_the_reason_names_the_error(program: str, reason: str, confined: str) -> None:
    outcome = run_program(program, TESTS, AMPLE)
    assert not outcome.passed
    assert outcome.reason.startswith(reason), outcome
    assert "\n" not in outcome.reason


def test_a_reason_is_short(confined: str) -> None:
    assert len(run_program("raise ValueError('x' * 10**6)", limits=AMPLE).reason) == 500


def test_the_environment_is_empty(confined: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "secret")
    outcome = run_program("import os\nraise ValueError(sorted(os.environ))", limits=AMPLE)
    # Python and the shell set the others.
    known = {"HOME", "TMPDIR", "PATH", "LC_CTYPE", "PWD", "OLDPWD", "SHLVL", "_"}
    assert set(outcome.reason.split("'")[1::2]) <= known


def test_files_outside_cannot_be_seen(confined: str, tmp_path: Path) -> None:
    outcome = run_program(f"import os\nassert not os.path.exists({str(tmp_path)!r})", limits=AMPLE)
    assert outcome.passed
    outcome = run_program("import os\nraise ValueError(os.listdir('.'))", limits=AMPLE)
    assert outcome.reason == "ValueError: []"


@pytest.mark.slow
def test_all_files_together_are_bounded(confined: str) -> None:
    many = "for name in range(40): open(str(name), 'wb').write(bytes(1 << 20))"
    assert "No space left" in run_program(many, limits=AMPLE).reason


@pytest.mark.slow
@pytest.mark.parametrize("program", ["while True: pass", "while True: print('x' * 4096)"])
def test_endless_programs_time_out(program: str, confined: str) -> None:
    assert run_program(program, limits=SHORT) == Outcome(False, "timed out")


def test_a_child_cannot_pass_for_its_parent(confined: str) -> None:
    program = f"import os\nif os.fork(): os.wait(); raise ValueError\n{RIGHT_ADD}"
    assert run_program(program, TESTS, AMPLE) == Outcome(False, "ValueError")


def test_many_runs_leave_nothing_open(confined: str) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    for program in ("", "1 / 0", "import os\nos._exit(3)"):
        run_program(program, limits=AMPLE)
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_a_confinement_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Confinement("broken", lambda megabytes: ["sh", "-c", "echo no space >&2; exit 1"])
    monkeypatch.setattr(confinement, "find_confinement", lambda: broken)
    with allow_programs(), pytest.raises(ProgramError, match=r"\(broken\): no space"):
        run_program("")


def test_programs_need_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "find_confinement", lambda: confinement.UNCONFINED)
    with pytest.raises(ProgramError, match="--run-code, or with KNN_MOE_RUN_CODE=1"):
        run_program("")
    with pytest.raises(ProgramError, match="'mbpp' runs programs that the model writes"):
        check_programs([MBPP])
    check_programs([Task(name="quiz", title="Quiz", kind=Choice(), files="quiz")])
    monkeypatch.setenv(CONSENT, "yes")
    with pytest.raises(ProgramError, match="now: 'yes'"):
        check_programs([MBPP])
    monkeypatch.setenv(CONSENT, "1")
    check_programs([MBPP])


def test_consent_ends_and_is_not_reduced() -> None:
    with allow_programs(unconfined=True):
        with allow_programs():
            assert os.environ[CONSENT] == "unconfined"
        assert os.environ[CONSENT] == "unconfined"
    assert CONSENT not in os.environ


def test_without_confinement_programs_are_refused(
    unconfined: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CONSENT, "1")
    gone = CONFINEMENTS[0]  # bubblewrap
    broken = Confinement("unshare", lambda megabytes: ["/bin/sh", "-c", "echo no >&2; false"])
    monkeypatch.setattr(confinement, "CONFINEMENTS", (gone, broken))
    monkeypatch.setenv("PATH", str(tmp_path))
    restricted = tmp_path / "apparmor_restrict"
    restricted.write_text("1\n")
    monkeypatch.setattr(confinement, "_RESTRICTION", restricted)
    with pytest.raises(ProgramError) as refused:
        check_programs([MBPP])
    for part in (
        "bubblewrap: bwrap is not installed",
        "unshare: no;",
        "AppArmor restricts user namespaces",
        "--run-unconfined",
    ):
        assert part in str(refused.value)


def test_programs_may_run_unconfined(unconfined: Path) -> None:
    check_programs([MBPP])
    assert run_program(RIGHT_ADD, TESTS, AMPLE).passed
    assert run_program("open('x', 'w').write('x')", limits=AMPLE).passed
    closed = "import os\nos.makedirs('a/b')\nos.chmod('a', 0)\nos.chmod('.', 0)"
    assert run_program(closed, limits=AMPLE).passed
    assert list(unconfined.iterdir()) == []


EVALUATOR = """
from knn_moe.tasks import allow_programs, confinement
from knn_moe.tasks.sandbox import run_program
chosen = next(each for each in confinement.CONFINEMENTS if each.name == {name!r})
confinement.find_confinement = lambda: chosen
with allow_programs():
    print(run_program("if True:\\n    import os\\n    os.chmod('.', 0)\\n", "x = 1").reason)
"""


# Python may be in root's home: this makes it readable, seen only from here.
AS_NOBODY = """
set -e
mount --bind "$1" /mnt
mount -t tmpfs -o mode=755 home "$HOME"
mkdir -p "$1"
mount --bind /mnt "$1"
shift
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_can_confine_programs(confined: str) -> None:
    """The tests may run as root, who has rights that other users do not have."""
    shell = ["unshare", "--mount", "sh", "-c", AS_NOBODY, "sh", sys.base_prefix]
    command = [*shell, sys.executable, "-c", EVALUATOR.format(name=confined)]
    source = str(Path(knn_moe.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "passed\n", done.stderr


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"seconds": 0.0}, "seconds must be a positive number, got 0.0."),
        ({"seconds": float("nan")}, "seconds must be a positive number, got nan."),
        ({"seconds": float("inf")}, "seconds must be a positive number, got inf."),
        ({"memory_mb": 63}, "memory_mb must be at least 64, which Python itself needs, got 63."),
        ({"file_mb": -1}, "file_mb must be at least 1, got -1."),
        ({"processes": 0}, "processes must be at least 1, got 0."),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Limits(**limits)
    assert str(error.value) == message
