"""The folder a build works in, from which a killed build is resumed.

NAME.partial/plan.json      all that decides the result: compared before a build is resumed
NAME.partial/journal.txt    the number of each batch whose rows are on disk, a line each
NAME.partial/memory/        the memory so far; renamed to NAME when it is whole
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from knn_moe.errors import BuildError
from knn_moe.memory.gamma import estimate_gammas
from knn_moe.memory.layers import LayerShape
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.memory.writer import MemoryWriter
from knn_moe.reference.provenance import Provenance


def partial_folder(target: Path) -> Path:
    """Return the folder that a build of `target` works in."""
    return target.with_name(f"{target.name}.partial")


class BuildCheckpoint:
    """The partial folder of `target`: fresh, or left by a killed build of the same memory.

    Raises:
        BuildError: The folder is of another build, or the disk is too small.
    """

    def __init__(
        self,
        target: Path,
        manifest: MemoryManifest,
        provenance: Provenance,
        shapes: Mapping[int, LayerShape],
    ) -> None:
        self.target = target
        self.manifest = manifest
        self.root = partial_folder(target)
        self.journal = self.root / "journal.txt"
        plan = _plan(manifest, provenance, shapes)
        fresh = not self.journal.is_file()
        if not fresh and _read_plan(self.root) != plan:
            raise BuildError(
                f"{str(self.root)!r} holds part of a build with another model, reference set or "
                f"config, or by another version. Delete it to start over, or build to another "
                f"folder."
            )
        self.finished = set() if fresh else _read_journal(self.journal)
        try:
            if fresh:
                shutil.rmtree(self.root, ignore_errors=True)
                (self.root / "memory").mkdir(parents=True)
                (self.root / "plan.json").write_text(json.dumps(plan, indent=2), encoding="utf8")
                _require_space(self.root, provenance, shapes)
            self.writer = MemoryWriter(self.root / "memory", provenance, shapes, fresh=fresh)
            # If there is a journal, every file has its full size and its header.
            self.journal.touch()
        except BaseException:
            if fresh:
                shutil.rmtree(self.root, ignore_errors=True)
            raise

    def mark(self, batch: int) -> None:
        """Record that all rows of `batch` are in the files."""
        with self.journal.open("a", encoding="utf8") as lines:
            lines.write(f"{batch}\n")

    def publish(self, manifest: MemoryManifest, device: torch.device) -> None:
        """Compute γ on `device`, seal the memory and remove the folder."""
        with self.writer.checksums() as described:
            gammas = estimate_gammas(self.writer.keys(), self.writer.provenance, device)
            self.writer.publish(manifest, self.target, gammas, described)
        shutil.rmtree(self.root)

    def __enter__(self) -> BuildCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.writer.close()
        # An error before the first batch leaves nothing to resume from.
        if kind is not None and self.root.exists() and not self.journal.stat().st_size:
            shutil.rmtree(self.root, ignore_errors=True)


def _plan(
    manifest: MemoryManifest, provenance: Provenance, shapes: Mapping[int, LayerShape]
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for column in provenance.tensors().values():
        digest.update(column.numpy().tobytes())
    layers = {str(index): [*shape[:2], str(shape.dtype)] for index, shape in shapes.items()}
    return {**manifest.to_dict(), "reference": digest.hexdigest(), "shapes": layers}


def _read_plan(root: Path) -> Any:
    try:
        return json.loads((root / "plan.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        return None


def _read_journal(path: Path) -> set[int]:
    """Return the finished batches. A kill may leave half a line, which is cut off."""
    text = path.read_text(encoding="utf8")
    whole = text[: text.rfind("\n") + 1]
    path.write_text(whole, encoding="utf8")
    return {int(line) for line in whole.splitlines()}


def _require_space(root: Path, provenance: Provenance, shapes: Mapping[int, LayerShape]) -> None:
    needed = len(provenance) * sum(
        shape.hidden_size * shape.dtype.itemsize + shape.num_experts * 4
        for shape in shapes.values()
    )
    free = shutil.disk_usage(root).free
    if needed > free:
        raise BuildError(
            f"The memory needs {needed / 1e9:,.1f} GB, and {str(root.parent)!r} has "
            f"{free / 1e9:,.1f} GB free. Use fewer examples, or another disk."
        )
