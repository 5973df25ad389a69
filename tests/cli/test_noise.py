"""What commands write to stderr when it is no terminal: their own sentences, nothing of others."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}  # nobody listens there


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "knn_moe.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


@pytest.mark.slow
def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    done = run("routers", "nobody/nothing", **NO_HUB, HF_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "'nobody/nothing': It is no folder, not in the cache, and the hub cannot be" in line


@pytest.mark.slow
def test_nothing_is_left_of_a_progress_bar(reference_file: Path, tmp_path: Path) -> None:
    here, there = pty.openpty()
    memory = tmp_path / "memory"
    command = ["build", "tiny-olmoe", str(reference_file), "-o", str(memory)]
    with subprocess.Popen(
        [sys.executable, "-m", "knn_moe.cli.main", *command],
        stderr=there,
        env=os.environ | {"COLUMNS": "400", "TERM": "xterm"},
    ) as build:
        os.close(there)
        shown = b""
        with suppress(OSError):  # how a terminal says that nobody writes to it any more
            while more := os.read(here, 65536):
                shown += more
    os.close(here)
    assert build.returncode == 0
    assert b"Building" in shown
    read, *_, first, second = lines = on_screen(shown.decode())
    assert read.startswith("Read ")
    assert not [line for line in lines if "Building" in line or "Loading" in line]
    assert first.startswith("RoutingMemory(")
    assert second.endswith(f"MB in {memory}")


def on_screen(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end, without empty ones."""
    lines, row = [""], 0
    for step in re.findall(r"\x1b\[[?\d;]*\w|\r|\n|[^\x1b\r\n]+", written):
        if step == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif step == "\x1b[2K":
            lines[row] = ""
        elif step.startswith("\x1b[") and step.endswith("A"):
            row -= int(step[2:-1])
        elif step.isprintable():
            lines[row] += step
    return [line.strip() for line in lines if line.strip()]


@pytest.mark.slow
def test_a_build_and_an_answer(reference_file: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    built = run("build", "tiny-olmoe", reference_file, "-o", memory, **NO_HUB)
    assert (built.returncode, built.stdout) == (0, "")
    read, first, second = built.stderr.splitlines()
    assert read.startswith("Read ")
    assert first.startswith("RoutingMemory(")
    assert second.endswith(f"MB in {memory}")
    asked = run("generate", "tiny-olmoe", "A fever is", "--memory", memory, "--max-new-tokens", 4)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout
