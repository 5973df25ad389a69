"""Folders that appear whole, last through a power cut, and have one writer at a time.

Knows names, locks and fsync; nothing of what the folders hold. A lock (flock) belongs to an open
folder, so it ends with its process, however that ends: a folder that can be locked has no writer.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from knn_moe.errors import DiskFullError

_AT_FDCWD: Final = -100
_NO_REPLACE: Final = 1  # renameat2's flags
_EXCHANGE: Final = 2
_SCRATCH: Final = "knn-moe-scratch-"  # in the name of every folder that may be swept


def expand_home(name: str | Path) -> Path:
    """Return a path with the home folder in place of ~; unchanged where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def require_space(folder: Path, needed: int) -> None:
    """Refuse to write more bytes than there is room for.

    Raises:
        DiskFullError: There is less.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFullError(
            f"Writing to {str(folder.parent)!r} needs {_megabytes(needed)}, and there are "
            f"{_megabytes(free)} free. Make room, or write to another disk."
        )


def _megabytes(size: int) -> str:
    """Return a size, as a person compares it with another."""
    return f"{size / 1e6:,.{3 if size < 1e6 else 1}f} MB"


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems keep the names of a folder safe themselves, and cannot be asked to.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until everything below `folder` is on disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def put_in_place(new: Path, target: Path) -> None:
    """Rename `new` to `target`, durably. What was there takes the name of `new`.

    Where the system can exchange two names, there is always a folder called `target`.

    Raises:
        FileExistsError: Something appeared under a name that was free.
    """
    occupied = target.exists()
    if not _renameat2(new, target, _EXCHANGE if occupied else _NO_REPLACE):
        retired = _retired(target)
        if occupied:
            target.rename(retired)
        new.rename(target)
        if occupied:
            retired.rename(new)
    sync(target.parent)
    if new.parent != target.parent:
        sync(new.parent)


def restore(target: Path) -> None:
    """Undo what a kill left between the renames of `put_in_place`, or finish it."""
    retired = _retired(target)
    if retired.is_dir():
        if target.exists():
            shutil.rmtree(retired, ignore_errors=True)
        else:
            retired.rename(target)


def _retired(target: Path) -> Path:
    return target.with_name(f".{target.name}.knn-moe-retired")


def _renameat2(new: Path, target: Path, flag: int) -> bool:
    """Rename atomically as `flag` says; return False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if not rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(target), flag):
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), str(target))


def claim(folder: Path) -> int | None:
    """Lock a folder until the descriptor that is returned is closed.

    Returns:
        The descriptor, or None if another writer has the folder, or it is gone.

    Raises:
        OSError: It cannot be opened, or the file system cannot lock a folder.
    """
    return _lock(folder, os.O_RDONLY | os.O_DIRECTORY)


def claim_file(path: Path) -> int | None:
    """Lock a file as `claim` locks a folder; the file is made if there is none."""
    return _lock(path, os.O_RDWR | os.O_CREAT)


def _lock(path: Path, flags: int) -> int | None:
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had the lock may have removed or replaced the folder before it was taken here.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def make_scratch(parent: Path, name: str) -> tuple[Path, int]:
    """Make a hidden scratch folder for `name` in `parent`, and sweep those of writers that died.

    Returns:
        The folder and its lock.
    """
    sweep(parent, name)
    prefix = f".{name}.{_SCRATCH}"
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = claim(folder)
        except OSError:  # without locks nothing is ever swept
            return folder, os.open(folder, os.O_RDONLY)
        if lock is not None:  # None: swept by another process before it was locked
            return folder, lock


def sweep(parent: Path, name: str) -> None:
    """Remove the scratch folders for `name` in `parent` that no writer has."""
    prefix = f".{name}.{_SCRATCH}"
    for entry in [entry.name for entry in os.scandir(parent) if entry.name.startswith(prefix)]:
        try:
            lock = claim(parent / entry)
        except OSError:  # somebody else's, or a file system without locks
            continue
        if lock is not None:
            shutil.rmtree(parent / entry, ignore_errors=True)
            os.close(lock)


@contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """Make a hidden folder beside `folder`, and remove whatever has its name in the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    restore(folder)
    scratch, lock = make_scratch(folder.parent, folder.name)
    scratch.chmod(0o755)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


class TemporaryFolder:
    """A folder that is removed together with the last reference to this object.

    Folders of processes that were killed are removed when the next one is made.
    """

    def __init__(self) -> None:
        self.path, lock = make_scratch(Path(tempfile.gettempdir()), "memory")
        weakref.finalize(self, _remove, self.path, lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
