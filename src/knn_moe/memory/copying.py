"""Copy the cases of memories into a new folder, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torch import Tensor

from knn_moe.memory import files
from knn_moe.memory.gamma import estimate_gammas
from knn_moe.memory.head_keys import join_head_keys, uses_head_keys
from knn_moe.memory.writer import MemoryWriter
from knn_moe.reference.provenance import Provenance
from knn_moe.reference.windows import Span
from knn_moe.support.folders import scratch_beside

if TYPE_CHECKING:
    from knn_moe.memory.memory import RoutingMemory

_ROWS: Final = 4096  # copied at a time


def write_cases(
    folder: Path,
    memories: Sequence[RoutingMemory],
    provenance: Provenance,
    *,
    rows: Tensor | None = None,
    gammas: Mapping[int, float] | None = None,
    overwrite: bool,
    durable: bool = True,
) -> None:
    """Write the cases of `memories`, one after the other, as one memory; with `rows`, only those of
    a single memory. Without `gammas` they are estimated."""
    folder = files.resolve_target(folder)
    files.refuse_existing(folder, overwrite=overwrite)
    shapes = {index: layer.shape for index, layer in memories[0].full_layers().items()}
    with (
        scratch_beside(folder) as scratch,
        closing(MemoryWriter(scratch, provenance, shapes)) as writer,
    ):
        row = 0
        for memory in memories:
            for index, layer in memory.full_layers().items():
                for start, part in _parts(len(memory), rows):
                    keys = layer.keys[part].cpu()
                    span = Span(row + start, 0, len(keys))
                    writer.write(index, "keys", keys, [span])
                    writer.write(index, "values", layer.values[part].cpu(), [span])
            row += len(memory)
        head_keys = None
        if uses_head_keys(memories[0].routing):
            parts = [memory.head_keys for memory in memories]
            head_keys = join_head_keys(parts, provenance, rows, same=gammas is not None)
        with writer.checksums() as described:
            gammas = gammas or estimate_gammas(writer.keys(), provenance)
            writer.seal(memories[0].manifest, gammas, described, head_keys=head_keys)
        files.publish(scratch, folder, overwrite=overwrite, durable=durable)


def _parts(cases: int, rows: Tensor | None) -> Iterator[tuple[int, slice | Tensor]]:
    """Yield some cases at a time, of all or of `rows`: where they begin in the file, and which they
    are."""
    if rows is None:
        for start in range(0, cases, _ROWS):
            yield start, slice(start, start + _ROWS)
    else:
        for start in range(0, len(rows), _ROWS):
            yield start, rows[start : start + _ROWS]
