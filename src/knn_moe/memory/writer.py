"""Stream a memory into a folder that appears under its name only when it is whole.

Rows come in any order and from any thread. Peak memory does not depend on how many there are:
each row goes to its place in a file of known size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.memory import files
from knn_moe.memory.card import model_card
from knn_moe.memory.head_keys import HeadKeys
from knn_moe.memory.layers import LayerShape
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.reference.provenance import Provenance
from knn_moe.reference.windows import Span
from knn_moe.support.files import write_whole
from knn_moe.support.folders import require_space, scratch_beside

_EARLIER_FIELDS: Final = ("learned", "domains")  # of a config of format 4


class MemoryWriter:
    """One partial folder, from its first row to its seal.

    With `fresh=False` it continues with the files of an earlier writer. A file of another size gets
    the right one, and `crcs` tells which rows are in it.
    """

    def __init__(
        self,
        partial: Path,
        provenance: Provenance,
        layers: Mapping[int, LayerShape],
        *,
        fresh: bool = True,
    ) -> None:
        self.partial = partial
        self.provenance = provenance
        self.layers = list(layers)
        cases = len(provenance)
        row = sum(
            shape.hidden_size * shape.dtype.itemsize + shape.num_experts * torch.float32.itemsize
            for shape in layers.values()
        )
        if fresh:
            require_space(partial, cases * row)
        files.write_tensors(partial / files.TOKENS_FILE, provenance.tensors())
        self._files: dict[int, files.StreamedFile] = {}
        try:
            for index, shape in layers.items():
                tensors = {
                    "keys": files.TensorPlan(shape.dtype, (cases, shape.hidden_size)),
                    "values": files.TensorPlan(torch.float32, (cases, shape.num_experts)),
                }
                path = self._path(index)
                self._files[index] = files.StreamedFile(path, tensors, fresh=fresh)
        except BaseException:
            self.close()
            raise

    def _path(self, layer: int) -> Path:
        return self.partial / files.layer_file(layer)

    def write(self, layer: int, name: str, rows: Tensor, spans: Iterable[Span]) -> int:
        """Write runs of a layer's "keys" or "values", and return their CRC-32.

        Shapes: rows [n, d or N], on the CPU.
        """
        return self._files[layer].write(name, rows, spans)

    def crcs(self, spans: Sequence[Span]) -> list[int]:
        """Return the CRC-32 of the runs in the files: keys and values of each layer in turn."""
        return [
            self._files[layer].crc(name, spans)
            for layer in self.layers
            for name in ("keys", "values")
        ]

    def sync(self) -> None:
        """Wait until all rows that were written are on disk."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Close the files. Does nothing the second time."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def keys(self) -> dict[int, Tensor]:
        """Map the keys that were written, by layer [M, d], so that γ can be computed from them."""
        return {index: files.read_tensors(self._path(index))["keys"] for index in self.layers}

    @contextmanager
    def checksums(self) -> Iterator[list[Future[dict[str, Any]]]]:
        """Close the files and compute their checksums in threads while the caller does more."""
        self.close()
        with ThreadPoolExecutor() as pool:
            yield [pool.submit(files.describe_file, self._path(index)) for index in self.layers]

    def seal(
        self,
        manifest: MemoryManifest,
        gammas: Mapping[int, float],
        described: Sequence[Future[dict[str, Any]]],
        *,
        head_keys: HeadKeys | None = None,
    ) -> None:
        """Make the folder a whole memory. `described` comes from `checksums`."""
        entries = [
            {"layer": index, "gamma": gammas[index], **entry.result()}
            for index, entry in zip(self.layers, described, strict=True)
        ]
        written = {"layers": entries, **write_head_keys(self.partial, head_keys)}
        seal(self.partial, manifest, self.provenance, written)


def write_head_keys(partial: Path, head_keys: HeadKeys | None) -> dict[str, Any]:
    """Write head keys, if there are any, and return what a memory's config says of them."""
    if head_keys is None:
        return {}
    path = partial / files.HEAD_FILE
    files.write_tensors(path, head_keys.tensors)
    return {"head_keys": {**head_keys.entry(), **files.describe_file(path)}}


def seal(
    partial: Path, manifest: MemoryManifest, provenance: Provenance, written: Mapping[str, Any]
) -> None:
    """Write config and card beside the files of `partial`.

    `written` has the entries of "layers", and of "head_keys" if there are any.
    """
    others = [written["head_keys"]] if "head_keys" in written else []
    config: dict[str, Any] = {
        **manifest.to_dict(),
        "keys": len(provenance),
        "examples": provenance.num_examples,
        "bytes": sum(entry["bytes"] for entry in [*written["layers"], *others]),
        "tokens": files.describe_file(partial / files.TOKENS_FILE),
        **written,
    }
    (partial / "README.md").write_text(model_card(config), encoding="utf8")
    files.write_config(partial, config)


def reseal(folder: Path, manifest: MemoryManifest) -> None:
    """Write another manifest into a memory's folder; its files stay as they are."""
    config = {**files.read_config(folder), **manifest.to_dict()}
    for name in _EARLIER_FIELDS:
        config.pop(name, None)
    write_whole(folder / "README.md", model_card(config))
    files.write_config(folder, config)


def write_layers(
    folder: Path,
    manifest: MemoryManifest,
    provenance: Provenance,
    layers: Iterable[tuple[int, Mapping[str, Any], Mapping[str, Tensor]]],
    *,
    head_keys: HeadKeys | None = None,
    overwrite: bool,
) -> None:
    """Write a memory of layers that come whole, one at a time: number, config entry, tensors."""
    folder = files.resolve_target(folder)
    files.refuse_existing(folder, overwrite=overwrite)
    with scratch_beside(folder) as scratch:
        files.write_tensors(scratch / files.TOKENS_FILE, provenance.tensors())
        entries = []
        for index, entry, tensors in layers:
            path = scratch / files.layer_file(index)
            files.write_tensors(path, tensors)
            entries.append({"layer": index, **entry, **files.describe_file(path)})
        written = {"layers": entries, **write_head_keys(scratch, head_keys)}
        seal(scratch, manifest, provenance, written)
        files.publish(scratch, folder, overwrite=overwrite)
