"""A disk that is too small: how much is needed, how much is free, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.commands import assert_refused, run_cli


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_memory_that_does_not_fit(
    disk: Path, saved_model: Path, saved_memory: Path, reference_file: Path
) -> None:
    (disk / "ballast").write_bytes(bytes(40_000))
    for command in (
        ("build", saved_model, reference_file),
        ("compress", saved_memory),
        ("prune", saved_memory, "--by", "chance", "--keep", 0.9),
        ("drop", saved_memory, "--example", 0),
    ):
        refused = run_cli(*command, "-o", disk / "memory")
        assert_refused(refused, f"Writing to '{disk}", "needs 0.0", " MB, and there are 0.0")
        assert [path.name for path in disk.iterdir()] == ["ballast"], command


def test_a_page_that_does_not_fit(disk: Path, saved_model: Path, saved_memory: Path) -> None:
    page = disk / "page.html"
    refused = run_cli("explain", saved_model, "5 6 7", "--memory", saved_memory, "-o", page)
    assert_refused(refused, "The disk is full")
    assert list(disk.iterdir()) == []
