"""What commands write to stderr when it is no terminal: their own sentences, nothing of others."""

from __future__ import annotations

import os
import subprocess
import sys
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
