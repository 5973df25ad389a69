"""Every launch of the kernels compiles for a GPU, which takes a compiler and no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "helpers" / "compile_kernels.py"


@pytest.mark.slow
def test_every_launch_compiles() -> None:
    """In a process of its own: here, kernels are made for Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    from knn_moe.index.fast import kernels as search_kernels
    from knn_moe.recall import kernels as prototype_kernels

    assert result.stdout.split() == sorted(search_kernels.__all__ + prototype_kernels.__all__)
