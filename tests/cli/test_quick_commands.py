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
