"""Completion in a real shell, quickly: without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """#!{python}
import sys
sys.modules |= dict.fromkeys(["torch", "transformers", "faiss", "matplotlib"])  # no import
from knn_moe.cli.main import main
main()
"""
COMPLETE = """
eval "$(_KNN_MOE_COMPLETE=bash_source knn-moe)"
complete -p knn-moe
COMP_WORDS=($WORDS "$LAST"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_knn_moe_completion knn-moe
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "last", "expected"),
    [
        ("knn-moe", "ca", ["calibrate"]),
        ("knn-moe build", "--ov", ["--overwrite"]),
        ("knn-moe eval", "--conf", ["--config"]),
        ("knn-moe eval tiny-olmoe -t", "arc", ["arc_easy", "arc_challenge"]),
        ("knn-moe eval tiny-olmoe -m", "knn-cal", None),
        ("knn-moe reproduce tables", "se", ["selective", "seeds"]),
        ("knn-moe build m r --dtype", "bf", ["bfloat16"]),
    ],
)
def test_bash_completes(words: str, last: str, expected: list[str] | None, tmp_path: Path) -> None:
    script = tmp_path / "knn-moe"
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE],
        env=os.environ | {"PATH": path, "WORDS": words, "LAST": last},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    registered, *found = done.stdout.splitlines()
    assert registered.endswith("-F _knn_moe_completion knn-moe")
    assert found == expected or (expected is None and "knn-calibrated+head" in found)
