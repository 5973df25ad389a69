"""What answers at once, because it imports neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A module that is None cannot be imported.
WITHOUT_TORCH = (
    "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers', 'faiss', 'matplotlib'])\n"
    "from knn_moe.cli.main import main; main()"
)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("--help", "calibrate"),
        ("eval --list", "kNN-MoE (calibrated) with its head"),
        ("eval --list --json", '"knn-lm"'),
        ("reproduce --list", "load-balancing"),
        ("build --help", "--calibrate"),
        ("bench retrieval --help", "--shape"),
    ],
)
def test_it_needs_no_torch(command: str, shown: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *command.split()], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


@pytest.mark.parametrize("command", ["", "bench"])
def test_a_group_without_a_command_shows_its_help_once(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *command.split()], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("Usage:") == 1
    assert "Error" not in done.stderr


def test_a_closed_output_is_no_error() -> None:
    program = f"import sys; sys.stdout = None; {WITHOUT_TORCH}"
    done = subprocess.run(
        [sys.executable, "-c", program, "eval", "--list"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_closed_input_holds_nothing() -> None:
    program = "import sys; sys.stdin = None; from knn_moe.cli.main import main; main()"
    command = [sys.executable, "-c", program, "build", "tiny-olmoe", "-", "-o", "memory"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "'standard input' is empty" in done.stderr
