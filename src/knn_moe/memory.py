"""The artefact: what a model remembers of a reference set, per layer.

Knows what a memory holds and whose it is. How it lies on disk is storage.py's, how it gets there
is writer.py's, how it is used is handle.py's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from torch import Tensor

from knn_moe import storage
from knn_moe.compressed import CompressedLayer
from knn_moe.config import BuildConfig, RoutingConfig
from knn_moe.errors import MemoryFormatError, MemoryMismatchError
from knn_moe.header import MemoryHeader
from knn_moe.identity import ModelIdentity
from knn_moe.provenance import Provenance, concatenate
from knn_moe.writer import LayerShape, MemoryWriter, scratch_beside, write_layers

_ROWS: Final = 4096  # copied at a time


@dataclass(frozen=True)
class LayerMemory:
    """One layer's cases. Shapes: keys [M, d], the model's dtype; values [M, N], fp32."""

    keys: Tensor
    values: Tensor
    gamma: float  # of the RBF kernel, from these keys' own distances

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        cases, hidden = self.keys.shape
        experts = self.values.shape[1]
        return f"LayerMemory({cases:,} cases, {hidden} → {experts}, γ={self.gamma:.3g})"

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.keys.shape[1], self.values.shape[1], self.keys.dtype)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


Layer: TypeAlias = LayerMemory | CompressedLayer


@dataclass(frozen=True, kw_only=True)
class RoutingMemory:
    """(router input → better routing logits) for every reference token and MoE layer."""

    layers: Mapping[int, Layer]
    provenance: Provenance
    header: MemoryHeader
    folder: Path | None = None
    _holds: object = field(default=None, repr=False)  # keeps a temporary folder alive

    def __len__(self) -> int:
        """Cases per layer."""
        return len(self.provenance)

    def __repr__(self) -> str:
        return (
            f"RoutingMemory({len(self):,} cases from {self.provenance.num_examples:,} examples × "
            f"{len(self.layers)} layers{', compressed' * self.compressed}, for {self.base_model})"
        )

    @property
    def base_model(self) -> ModelIdentity:
        return self.header.base_model

    @property
    def build(self) -> BuildConfig:
        return self.header.build

    @property
    def routing(self) -> RoutingConfig:
        """How the memory is meant to be used; `attach` takes this by default."""
        return self.header.routing

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def compressed(self) -> bool:
        """Whether the keys became an index (`compress`)."""
        return any(isinstance(layer, CompressedLayer) for layer in self.layers.values())

    def full_layers(self) -> dict[int, LayerMemory]:
        """The layers, with their keys; refused where they have none any more."""
        full = {i: layer for i, layer in self.layers.items() if isinstance(layer, LayerMemory)}
        if len(full) < len(self.layers):
            raise MemoryFormatError(
                f"{self!r} has no keys to work on: use the memory that it was compressed from."
            )
        return full

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, verify: bool = True
    ) -> RoutingMemory:
        """Open a memory from a folder or a hub id, memory-mapped.

        `verify` compares every file's checksum, which reads it all once; sizes, the format and
        the config's own digest are always checked.
        """
        folder = Path(source) if Path(source).is_dir() else _download(str(source), revision)
        config = storage.read_config(folder)
        entries = [config["tokens"], *config["layers"]]
        with ThreadPoolExecutor() as pool:
            check = partial(storage.check_file, folder, contents=verify)
            tokens, *layers = pool.map(check, entries)
        return cls(
            layers={
                entry["layer"]: _read_layer(entry, storage.read_tensors(path))
                for entry, path in zip(config["layers"], layers, strict=True)
            },
            provenance=Provenance(**storage.read_tensors(tokens)),
            header=MemoryHeader.from_dict(config),
            folder=folder,
        )

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the memory to `folder`, whole or not at all."""
        if self.compressed:
            layers = [
                (index, layer.entry(), layer.tensors)
                for index, layer in self.layers.items()
                if isinstance(layer, CompressedLayer)
            ]
            write_layers(Path(folder), self.header, self.provenance, layers, overwrite=overwrite)
            return
        gammas = {index: layer.gamma for index, layer in self.layers.items()}
        _write(Path(folder), [self], self.provenance, gammas, overwrite=overwrite)

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the memory and its card as a model repository; returns the commit's address."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "memory"
            self.save_pretrained(folder)
            card = folder / "README.md"
            text = card.read_text(encoding="utf8").replace("REPO_OR_FOLDER", repo_id)
            card.write_text(text, encoding="utf8")
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder))

    def merge(
        self, *others: RoutingMemory, folder: str | Path | None = None, overwrite: bool = False
    ) -> RoutingMemory:
        """One memory of the cases of all, with γ taken from their joint distances.

        What the memory says of its build and use is the first one's; what a calibration found for
        that one alone is forgotten, and its preset's routing is back.
        Streamed to `folder` and opened from there; without one, to a temporary folder that lives
        as long as the memory.
        """
        for memory in (self, *others):
            memory.full_layers()
        for other in others:
            _check_mergeable(self, other)
        memories = [replace(self, header=self.header.uncalibrated()), *others]
        holds = storage.TemporaryFolder() if folder is None else None
        target = holds.path / "memory" if holds else Path(str(folder))
        provenance = concatenate([memory.provenance for memory in memories])
        _write(target, memories, provenance, gammas=None, overwrite=overwrite)
        return replace(RoutingMemory.from_pretrained(target, verify=False), _holds=holds)


def _write(
    folder: Path,
    memories: Sequence[RoutingMemory],
    provenance: Provenance,
    gammas: dict[int, float] | None,
    *,
    overwrite: bool,
) -> None:
    """The cases of `memories`, one after the other, as one memory in `folder`."""
    storage.refuse_existing(folder, overwrite=overwrite)
    shapes = {index: layer.shape for index, layer in memories[0].layers.items()}
    with scratch_beside(folder) as scratch:
        writer = MemoryWriter(scratch, provenance, shapes)
        row = 0
        for memory in memories:
            for index, layer in memory.full_layers().items():
                for start in range(0, len(memory), _ROWS):
                    part = slice(start, start + _ROWS)
                    span = storage.Span(row + start, 0, len(layer.keys[part]))
                    writer.write(index, "keys", layer.keys[part].cpu(), [span])
                    writer.write(index, "values", layer.values[part].cpu(), [span])
            row += len(memory)
        writer.finish(memories[0].header, folder, gammas=gammas, overwrite=overwrite)


def _read_layer(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Layer:
    if "index" in entry:
        return CompressedLayer.read(entry, tensors)
    return LayerMemory(gamma=entry["gamma"], **tensors)


def _check_mergeable(first: RoutingMemory, other: RoutingMemory) -> None:
    if first.base_model.fingerprint != other.base_model.fingerprint:
        raise MemoryMismatchError(
            f"These memories belong to different models, {first.base_model} and "
            f"{other.base_model}, and cannot be merged."
        )
    mine, theirs = (
        {index: layer.shape for index, layer in memory.layers.items()} for memory in (first, other)
    )
    if mine != theirs:
        raise MemoryMismatchError(
            f"These memories hold different layers or precisions ({sorted(mine)} and "
            f"{sorted(theirs)}) and cannot be merged. Build them alike."
        )


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, revision=revision))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MemoryFormatError(
            f"No memory at {repo_id!r}: no such folder, and the hub did not give it ({reason})"
        ) from None
