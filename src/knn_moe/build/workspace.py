"""The folder that a memory is made in, from which a killed job is resumed.

    NAME.partial/plan.json      all that decides the result: compared before a job is resumed
    NAME.partial/sealed.json    the digest of the finished memory, just before it gets its name
    NAME.partial/…              what has been made so far

One process works in it at a time. Once NAME is there, the folder is removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from knn_moe.errors import BuildError, MemoryFormatError
from knn_moe.memory.files import (
    is_own_file,
    publish,
    read_config,
    refuse_existing,
    resolve_target,
)
from knn_moe.support.files import write_whole
from knn_moe.support.folders import claim, claim_file, restore, scratch_beside, sweep, sync

_PLAN: Final = "plan.json"
_SEALED: Final = "sealed.json"
_LOCK: Final = "lock"  # only on file systems that cannot lock a folder
_EMPTY: Final = {_PLAN, _LOCK}  # what a folder holds from which nothing can be resumed
_PARTS: Final = re.compile(
    r"(plan|sealed)\.json(\.new)?|journal\.txt(\.new)?|lock|memory|(new|choice-\d)(\.partial)?"
    r"|\.(memory|new|choice-\d)\.knn-moe-(scratch-.*|retired)|done"
)


def partial_folder(target: Path) -> Path:
    """Return the folder that a memory called `target` is made in."""
    target = resolve_target(target)
    return target.with_name(f"{target.name}.partial")


class Workspace:
    """The partial folder of `target`, locked: fresh, or left by a killed job of the same plan.

    Args:
        target: The memory that is made.
        plan: All that decides it, as JSON takes it.
        overwrite: Replace a memory called `target`.
        durable: Wait for the disk, so that a power cut loses nothing that was reported as done.

    Raises:
        BuildError: Another process is making `target`, the folder is of another job, or it holds
            something else.
        MemoryFormatError: `target` exists and must not be overwritten.
    """

    def __init__(
        self,
        target: Path,
        plan: Mapping[str, Any],
        *,
        overwrite: bool = False,
        durable: bool = True,
    ) -> None:
        self.target, self.root = resolve_target(target), partial_folder(target)
        restore(self.target)
        self.overwrite, self.durable = overwrite, durable
        self._lock: int | None = _lock(self.root)
        try:
            refuse_strangers(self.root)
            self.fresh = self._begin(json.loads(json.dumps(plan)))
            if not self.published:
                refuse_existing(self.target, overwrite=overwrite)
        except BaseException:
            self.close()
            raise

    def _begin(self, plan: Any) -> bool:
        """Write the plan, or compare it with that of the job to resume; return if it is new."""
        left = {path.name for path in self.root.iterdir()} - {f"{_PLAN}.new", _LOCK}
        if left:
            try:
                found = json.loads((self.root / _PLAN).read_text(encoding="utf8"))
            except (OSError, ValueError):
                warnings.warn(
                    f"{str(self.root)!r} is damaged: it has no readable plan. The job starts "
                    f"again.",
                    stacklevel=4,
                )
                self._empty()
            else:
                if found != plan:
                    raise BuildError(
                        f"{str(self.root)!r} holds part of a build with another model, reference "
                        f"set or config, or by another version. Delete it to start over, or build "
                        f"to another folder."
                    )
                return False
        write_whole(self.root / _PLAN, json.dumps(plan, indent=2))
        if self.durable:
            sync(self.root.parent)
        return True

    @property
    def published(self) -> bool:
        """Whether the memory of this job has its name already: a kill came just after."""
        try:
            digest = json.loads((self.root / _SEALED).read_text(encoding="utf8"))
            return bool(read_config(self.target)["digest"] == digest)
        except (OSError, ValueError, MemoryFormatError):
            return False

    def publish(self, memory: Path, *, keep: bool = False) -> None:
        """Give a sealed memory its name and remove the folder, or `keep` what it says of it."""
        overwrite = self.overwrite or self.published
        write_whole(self.root / _SEALED, json.dumps(read_config(memory)["digest"]))
        publish(memory, self.target, overwrite=overwrite, durable=self.durable)
        if not keep:
            self.remove()

    def free(self, name: str) -> Path:
        """Return a place in the folder, and remove what a killed job has left there."""
        shutil.rmtree(self.root / name, ignore_errors=True)
        return self.root / name

    @property
    def closed(self) -> bool:
        """Whether the folder was released: another process may work in it."""
        return self._lock is None

    def remove(self) -> None:
        """Remove the folder and all that is in it, at once for all who look for it."""
        with scratch_beside(self.target) as scratch:
            self.root.rename(scratch / "done")
        self.close()

    def close(self) -> None:
        """Release the folder, and remove it if it holds nothing to resume from."""
        if self._lock is None:
            return
        if self.root.is_dir() and {path.name for path in self.root.iterdir()} <= _EMPTY:
            shutil.rmtree(self.root, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def _empty(self) -> None:
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def discard(target: Path) -> None:
    """Remove all that interrupted jobs left of a memory called `target`.

    Raises:
        BuildError: Another process is working on it, or the folder holds something else.
    """
    root = partial_folder(target)
    if root.parent.is_dir():
        sweep(root.parent, resolve_target(target).name)
    if root.exists():
        lock = _lock(root)
        try:
            refuse_strangers(root)
            shutil.rmtree(root)
        finally:
            os.close(lock)


def _lock(root: Path) -> int:
    """Make `root` if there is none, and lock it.

    Raises:
        BuildError: Another process has it, or it is a file.
    """
    if root.exists() and not root.is_dir():
        raise BuildError(f"{str(root)!r} is a file. Move it away, or choose another folder.")
    root.mkdir(parents=True, exist_ok=True)
    try:
        lock = claim(root)
    except OSError:  # NFS, for example, locks files alone
        lock = _lock_file(root)
    if lock is None:
        raise BuildError(
            f"Another process is working in {str(root)!r}. Wait for it, or choose another folder."
        )
    return lock


def _lock_file(root: Path) -> int | None:
    try:
        return claim_file(root / _LOCK)
    except OSError as error:
        warnings.warn(
            f"{str(root)!r} cannot be locked ({error.strerror}). Make sure that no other process "
            f"builds to the same folder.",
            stacklevel=6,
        )
        return os.open(root, os.O_RDONLY)


def refuse_strangers(root: Path) -> None:
    """Raise BuildError if the folder holds something that no build wrote."""
    names = sorted(path.name for path in root.rglob("*"))
    strangers = [name for name in names if not (_PARTS.fullmatch(name) or is_own_file(name))]
    if strangers:
        raise BuildError(
            f"{str(root)!r} holds {strangers[0]!r}, which is no part of a build. Move it away, or "
            f"build to another folder."
        )
