"""A build's rows in its workspace, batch by batch, and which batches a resumed build can trust.

NAME.partial/journal.txt    a line for each batch whose rows are on disk: its number, and a CRC-32
                            of its keys and of its values in each layer
NAME.partial/memory/        the memory so far

A line is written after the rows it speaks of, and believed only if the rows agree with it: neither
a kill nor a power cut can make a resumed build keep rows that were never written.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from knn_moe.build.workspace import Workspace
from knn_moe.memory.gamma import estimate_gammas
from knn_moe.memory.layers import LayerShape
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.memory.writer import MemoryWriter
from knn_moe.reference.provenance import Provenance
from knn_moe.reference.windows import Batch
from knn_moe.support.files import write_whole

_LINE: Final = re.compile(rb"(\d{1,18})((?: [0-9a-f]{8})+)")


class BuildCheckpoint:
    """The rows of a build in `workspace`: none yet, or those of a build that was interrupted.

    Raises:
        DiskFullError: The disk is too small.
    """

    def __init__(
        self,
        workspace: Workspace,
        manifest: MemoryManifest,
        provenance: Provenance,
        shapes: Mapping[int, LayerShape],
    ) -> None:
        self.workspace = workspace
        self.manifest = manifest
        self.journal = workspace.root / "journal.txt"
        self.memory = workspace.root / "memory"
        self._lines = _read_journal(self.journal)
        try:
            self.memory.mkdir(exist_ok=True)
            fresh = not self._lines
            self.writer = MemoryWriter(self.memory, provenance, shapes, fresh=fresh)
        except BaseException:
            self._forget_if_empty()
            raise

    def has(self, number: int, batch: Batch) -> bool:
        """Tell whether all rows of a batch are in the files."""
        line = self._lines.get(number)
        if line is None:
            return False
        if line == self.writer.crcs(batch.spans):
            return True
        warnings.warn(
            f"{str(self.workspace.root)!r} is damaged: rows that it names are not in it. They are "
            f"computed again.",
            stacklevel=4,
        )
        return False

    def mark(self, batch: int, crcs: Sequence[int]) -> None:
        """Record that all rows of `batch` are in the files, and their CRC-32."""
        if self.workspace.durable:
            self.writer.sync()
        line = f"{batch} {' '.join(f'{crc:08x}' for crc in crcs)}\n"
        with self.journal.open("a", encoding="ascii") as lines:
            lines.write(line)
            lines.flush()
            if self.workspace.durable:
                os.fsync(lines.fileno())

    def publish(self, device: torch.device, *, keep: bool = False) -> None:
        """Compute γ on `device`, seal the memory and give it its name; `keep` as in Workspace."""
        with self.writer.checksums() as described:
            gammas = estimate_gammas(self.writer.keys(), self.writer.provenance, device)
            self.writer.seal(self.manifest, gammas, described)
        self.workspace.publish(self.memory, keep=keep)

    def __enter__(self) -> BuildCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.writer.close()
        self._forget_if_empty()

    def _forget_if_empty(self) -> None:
        """Remove the files of a build that has no batch to resume from."""
        if self.workspace.closed:
            return
        if not self.journal.exists() or not self.journal.stat().st_size:
            self.journal.unlink(missing_ok=True)
            shutil.rmtree(self.memory, ignore_errors=True)


def make_plan(
    manifest: MemoryManifest, provenance: Provenance, shapes: Mapping[int, LayerShape]
) -> dict[str, Any]:
    """Return all that decides a memory, as JSON takes it."""
    layers = {str(index): [*shape[:2], str(shape.dtype)] for index, shape in shapes.items()}
    reference = digest_reference(provenance)
    return {**manifest.to_dict(), "reference": reference, "shapes": layers}


def digest_reference(provenance: Provenance) -> str:
    """Return the SHA-256 of the reference tokens and of the places that become cases."""
    digest = hashlib.sha256()
    for column in provenance.tensors().values():
        digest.update(column.numpy().tobytes())
    return digest.hexdigest()


def _read_journal(path: Path) -> dict[int, list[int]]:
    """Return the CRCs of each finished batch, and remove what is no line: half of one after a kill,
    anything after a power cut."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    found = [_LINE.fullmatch(line) for line in text.split(b"\n")[:-1]]
    matches = [match for match in found if match]
    if len(matches) < len(found):
        warnings.warn(
            f"{str(path)!r} is damaged. The batches that it does not name are computed again.",
            stacklevel=4,
        )
    whole = b"".join(match.group() + b"\n" for match in matches)
    if whole != text:
        write_whole(path, whole.decode("ascii"))
    return {
        int(match.group(1)): [int(crc, 16) for crc in match.group(2).split()] for match in matches
    }
