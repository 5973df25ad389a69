"""Folders that are put in place atomically, locked by one writer, and swept after one that died."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from knn_moe.support import folders
from knn_moe.support.folders import (
    TemporaryFolder,
    claim,
    make_scratch,
    put_in_place,
    restore,
    scratch_beside,
    sync,
)


def make(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("system", ["exchanges", "renames only"])
def test_a_folder_takes_the_place_of_another(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "renames only":
        monkeypatch.setattr(folders, "_renameat2", lambda *_: False)
    new, old = make(tmp_path / "new", "new"), make(tmp_path / "old", "old")
    put_in_place(new, old)
    assert (old / "file").read_text() == "new"
    assert (new / "file").read_text() == "old"
    put_in_place(new, tmp_path / "free")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free", "old"]


def test_a_kill_between_two_renames_is_undone_or_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_renameat2", lambda *_: False)
    rename = Path.rename
    for killed_after, kept in ((1, "old"), (2, "new")):
        target, new = make(tmp_path / "memory", "old"), make(tmp_path / "new", "new")
        renames = iter(range(killed_after))

        def die(path: Path, to: Path, renames: Iterator[int] = renames) -> Path:
            if next(renames, None) is None:
                raise KeyboardInterrupt
            return rename(path, to)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", die)
            with pytest.raises(KeyboardInterrupt):
                put_in_place(new, target)
        restore(target)
        assert (target / "file").read_text() == kept
        assert {path.name for path in tmp_path.iterdir()} <= {"memory", "new"}
        for path in tmp_path.iterdir():
            shutil.rmtree(path)


def test_a_folder_that_cannot_be_synced_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Invalid"):
        sync(tmp_path / "file")


def test_what_appears_under_a_free_name_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, other = make(tmp_path / "new", "new"), make(tmp_path / "other", "other")
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as it was a moment ago
    with pytest.raises(FileExistsError):
        put_in_place(new, other)
    assert (other / "file").read_text() == "other"


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    first = claim(tmp_path)
    assert first is not None
    assert claim(tmp_path) is None
    os.close(first)
    again = claim(tmp_path)
    assert again is not None
    os.close(again)
    assert claim(tmp_path / "missing") is None


def test_scratch_of_a_writer_that_died_is_swept_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    process = os.fork()
    if not process:
        folder, _ = make_scratch(tmp_path, "memory")
        (folder / "layer").write_text("large")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    (left,) = tmp_path.iterdir()
    (tmp_path / ".memory-of-mine").mkdir()
    living, lock = make_scratch(tmp_path, "memory")
    assert not left.exists()
    with scratch_beside(tmp_path / "memory"):
        assert living.exists()
    os.close(lock)
    with scratch_beside(tmp_path / "other"):
        assert living.exists()
    with scratch_beside(tmp_path / "memory"):
        assert not living.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".memory-of-mine"]


def test_temporary_folders_of_the_dead_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = os.fork()
    if not process:
        TemporaryFolder()
        kept = TemporaryFolder()
        (kept.path / "layer").write_text("large")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    assert len(list(tmp_path.iterdir())) == 1
    folder = TemporaryFolder()
    assert list(tmp_path.iterdir()) == [folder.path]
    del folder
    assert list(tmp_path.iterdir()) == []
