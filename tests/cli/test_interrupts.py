"""Ctrl-C ends a command with its processes, and one line says how to go on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from helpers.quiz import make_questions
from knn_moe.cli.program import how_to_continue

# Python cannot raise an exception while it computes a key, which would take half an hour. The other
# thread says so when that has begun: before, the main thread does not let it.
BUSY = """
import hashlib, sys
from threading import Timer
from knn_moe.cli.program import Program

Program(["build", "model", "ref.jsonl", "-o", "out"]).start()
sys.setswitchinterval(1000)
Timer(0.1, print, ("busy",), {"flush": True}).start()
hashlib.pbkdf2_hmac("sha256", b"a", b"b", (1 << 31) - 1)
"""

# Python ignores an exception in a finalizer, and says so.
IN_A_FINALIZER = """
import os, signal, time
from knn_moe.cli.program import Program

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(3600)

program = Program([])
program.start()
try:
    Late()
    time.sleep(3600)
except KeyboardInterrupt:
    program.say()
    program.exit_code = 130
"""


@contextmanager
def running(*command: object) -> Iterator[subprocess.Popen[str]]:
    """Start a program in a process group of its own, and leave nothing of the group."""
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            yield program
        finally:
            if alive_in(program.pid):
                os.killpg(program.pid, signal.SIGKILL)


def alive_in(group: int) -> list[str]:
    """Return the processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, owner = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(owner) == group and state != "Z":
            found.append(path.parent.name)
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    for _ in range(12_000):
        if condition():
            return
        Event().wait(0.01)
    raise AssertionError("It never came to that.")


@pytest.fixture
def study(tmp_path: Path) -> list[str]:
    """The arguments of a study in two processes that takes longer than the test."""
    for name, rows in (("quiz", make_questions(400)), ("quiz_ref", make_questions(40, seed=1))):
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf8")
    models = ["--model", "tiny-olmoe", "--model", "tiny-qwen3"]
    task = ["-t", str(tmp_path / "quiz.jsonl"), "--limit", "400"]
    return ["reproduce", "main", *models, *task, "-o", str(tmp_path / "out"), "--jobs", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "at_work"),
    [
        pytest.param(os.killpg, False, id="terminal, while its processes start"),
        pytest.param(os.kill, True, id="kill -INT, while they work"),
    ],
)
def test_a_study_in_processes(
    send: Callable[[int, int], None], at_work: bool, study: list[str], tmp_path: Path
) -> None:
    with running("-m", "knn_moe.cli.main", *study) as program:
        if at_work:
            wait_until((tmp_path / "out" / "study.json").exists)
        else:  # the command, two processes, and the tracker of what they share
            wait_until(lambda: len(alive_in(program.pid)) == 4)
        send(program.pid, signal.SIGINT)
        shown, said = program.communicate(timeout=60)
        wait_until(lambda: not alive_in(program.pid))
    assert (program.returncode, shown) == (130, "")
    how = f"Interrupted. The same command continues: knn-moe {' '.join(study)}"
    assert said.splitlines() == [how]


def test_a_command_that_cannot_hear_the_signal() -> None:
    with running("-c", BUSY) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "busy\n"
        os.kill(program.pid, signal.SIGINT)
        _, said = program.communicate(timeout=60)
    assert program.returncode == 130
    how = "Continue with: knn-moe build model ref.jsonl -o out --resume"
    assert said.strip() == f"Interrupted. {how}"


def test_an_interrupt_that_a_finalizer_swallows() -> None:
    with running("-c", IN_A_FINALIZER) as program:
        _, said = program.communicate(timeout=60)
    assert (program.returncode, said) == (130, "Interrupted.\n")


JUDGE = "label m p.jsonl -o r.jsonl --judge=http://x/v1"


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("build m 'a b' -o x --overwrite", "Continue with: knn-moe {} --resume"),
        ("eval m -o runs --resume", "Continue with: knn-moe {}"),
        (JUDGE, "The same command continues: knn-moe {}"),
    ],
)
def test_how_to_continue(command: str, how: str) -> None:
    assert how_to_continue(shlex.split(command)) == f"Interrupted. {how.format(command)}"


def test_what_was_replaced_is_not_replaced_again() -> None:
    end = "Continue with: knn-moe eval m -o runs --resume"
    assert how_to_continue(["eval", "m", "-o", "runs", "--overwrite"]) == f"Interrupted. {end}"


@pytest.mark.parametrize("command", ["", "label m p.jsonl -o r.jsonl", "generate m hello"])
def test_what_cannot_be_continued(command: str) -> None:
    assert how_to_continue(command.split()) == "Interrupted."
