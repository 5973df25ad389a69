"""The artefact: what a model remembers of a reference set, per layer.

Knows what a memory holds and whose it is. `files.py` knows how it lies on disk, `writer.py` how it
gets there, `reader.py` how it comes back.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from knn_moe.config import BuildConfig, RoutingConfig
from knn_moe.errors import ConfigError, MemoryFormatError
from knn_moe.memory import files
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.copying import write_cases
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.head_keys import HeadKeys, uses_head_keys
from knn_moe.memory.layers import LayerMemory
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.memory.merging import (
    check_mergeable,
    differing_settings,
    join_pruned,
    refuse_merging_again,
    refuse_one_memory_twice,
)
from knn_moe.memory.reader import read_folder
from knn_moe.memory.summary import summary_table
from knn_moe.memory.writer import write_layers
from knn_moe.reference.provenance import Provenance, check_droppable, concatenate, owners
from knn_moe.reference.windows import ReferenceTokens
from knn_moe.routers.fingerprint import ModelIdentity
from knn_moe.support.folders import TemporaryFolder, expand_home
from knn_moe.support.given import describe, kind_of_place

Layer: TypeAlias = LayerMemory | CompressedLayer | DistilledLayer


@dataclass(frozen=True, kw_only=True)
class RoutingMemory:
    """(router input → better routing logits) for every reference token and MoE layer."""

    layers: Mapping[int, Layer]
    provenance: Provenance
    manifest: MemoryManifest
    folder: Path | None = None
    head_keys: HeadKeys | None = None  # only where the head looks up hidden states
    _holds: object = field(default=None, repr=False)  # keeps a temporary folder alive

    def __len__(self) -> int:
        """Cases per layer."""
        return len(self.provenance)

    def __repr__(self) -> str:
        return (
            f"RoutingMemory({len(self):,} cases from {self.provenance.num_examples:,} examples × "
            f"{len(self.layers)} layers{self.form}, for {self.base_model})"
        )

    def _repr_html_(self) -> str:
        """The most important facts, where a notebook shows a memory."""
        return summary_table(self).to_html()

    @property
    def base_model(self) -> ModelIdentity:
        """The model that the memory was built for."""
        return self.manifest.base_model

    @property
    def build(self) -> BuildConfig:
        """How the memory was built."""
        return self.manifest.build

    @property
    def routing(self) -> RoutingConfig:
        """How the memory is meant to be used; `attach` takes this by default."""
        return self.manifest.routing

    @property
    def nbytes(self) -> int:
        """The size of all keys, values and indexes, in bytes."""
        head = self.head_keys.nbytes if self.head_keys else 0
        return head + sum(layer.nbytes for layer in self.layers.values())

    @property
    def compressed(self) -> bool:
        """Whether the keys became an index (`compress`)."""
        return any(isinstance(layer, CompressedLayer) for layer in self.layers.values())

    @property
    def distilled(self) -> bool:
        """Whether the cases became a few prototypes (`distil`)."""
        return any(isinstance(layer, DistilledLayer) for layer in self.layers.values())

    @property
    def form(self) -> str:
        """What became of the cases, as words behind a comma; nothing if they are there."""
        return ", distilled" * self.distilled + ", compressed" * self.compressed

    def full_layers(self) -> dict[int, LayerMemory]:
        """Return the layers with their keys.

        Raises:
            MemoryFormatError: The memory is compressed or distilled and has no keys.
        """
        full = {i: layer for i, layer in self.layers.items() if isinstance(layer, LayerMemory)}
        if len(full) < len(self.layers):
            raise MemoryFormatError(f"{self!r} has no keys. Use the memory that it was made from.")
        return full

    def reference_tokens(self) -> ReferenceTokens:
        """Return the tokens the memory was built from, as it read them."""
        kept = torch.zeros(len(self.provenance.stream), dtype=torch.bool)
        kept[self.provenance.key] = True
        everything = self.build.tokens == "all"
        scored = torch.ones_like(kept) if everything else self.provenance.in_completion
        scored[self.provenance.begin[1:] - 1] = False  # a window's last token has no next one
        return ReferenceTokens(self.provenance, scored, kept)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, verify: bool = True
    ) -> RoutingMemory:
        """Open a memory from a folder or a hub id, memory-mapped.

        Args:
            source: A folder, or the id of a repository on the hub.
            revision: A branch, tag or commit on the hub.
            verify: Compare every file's checksum and check every number, which reads it all once.
                The config, sizes and shapes are always checked, and numbers at the latest when the
                memory is attached.

        Returns:
            The memory; its tensors are read when they are used.

        Raises:
            MemoryFormatError: There is no memory, or it is truncated, edited, of a newer format, or
                holds what no memory can hold.
        """
        if not isinstance(source, str | Path):
            raise MemoryFormatError(
                f"A memory is opened by its folder or hub id, and {describe(source)} is neither."
            )
        folder = expand_home(source)
        if not folder.is_dir():
            kind = kind_of_place(source)
            if kind is not None:
                raise MemoryFormatError(f"No memory at {str(source)!r}: it is {kind}.")
            if isinstance(source, Path) or source.startswith((".", "/", "~")):
                raise MemoryFormatError(f"No memory at {str(source)!r}: there is no such folder.")
            folder = files.download(source, revision)
        contents = read_folder(folder, verify=verify)
        return cls(**contents._asdict(), folder=folder)

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the memory to `folder`, whole or not at all.

        Args:
            folder: Where to write it.
            overwrite: Replace a memory that is there.

        Raises:
            MemoryFormatError: The folder exists and `overwrite` is not set, or is no memory.
        """
        if self.compressed or self.distilled:
            layers = [
                (index, layer.entry(), layer.tensors)
                for index, layer in self.layers.items()
                if not isinstance(layer, LayerMemory)
            ]
            write_layers(
                Path(folder),
                self.manifest,
                self.provenance,
                layers,
                head_keys=self.head_keys if uses_head_keys(self.routing) else None,
                overwrite=overwrite,
            )
            return
        write_cases(
            Path(folder), [self], self.provenance, gammas=self._gammas(), overwrite=overwrite
        )

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the memory and its card as a model repository, and return the commit's address."""
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
        self,
        *others: RoutingMemory | str | Path,
        folder: str | Path | None = None,
        overwrite: bool = False,
    ) -> RoutingMemory:
        """Make one memory of the cases of all. γ is computed from their joint distances.

        The manifest is the first memory's, and a warning names the settings that differ. What a
        calibration found for that one alone is forgotten, its head included, and the routing of its
        preset is back. First tokens are left to the router if any memory does so: trained values
        may harm them.

        Args:
            others: Memories for the same model, built alike, or their folders or hub ids.
            folder: Where the memory is written and opened. None: a temporary folder that lives as
                long as the memory.
            overwrite: Replace a memory that is in `folder`.

        Returns:
            The merged memory.

        Raises:
            MemoryMismatchError: The memories do not belong together, or two are the same.
        """
        opened = [
            other if isinstance(other, RoutingMemory) else RoutingMemory.from_pretrained(other)
            for other in others
        ]
        memories = [self, *opened]
        for memory in memories:
            memory.full_layers()
            check_mergeable(self, memory)
        refuse_one_memory_twice(memories)
        if folder is not None:
            refuse_merging_again(memories, Path(folder))
        differing = differing_settings(memories)
        if differing is not None:
            warnings.warn(differing, stacklevel=2)
        manifest = self.manifest.without_calibration()
        spare = any(memory.routing.spare_first_token for memory in memories)
        manifest = replace(
            manifest,
            routing=replace(manifest.routing, spare_first_token=spare),
            pruned=join_pruned(memories),
            values_trained=any(memory.manifest.values_trained for memory in memories),
        )
        provenance = concatenate([memory.provenance for memory in memories])
        return _write_and_open(
            folder, [replace(self, manifest=manifest), *opened], provenance, overwrite=overwrite
        )

    def subset(
        self,
        rows: Tensor,
        *,
        manifest: MemoryManifest | None = None,
        folder: str | Path | None = None,
        overwrite: bool = False,
    ) -> RoutingMemory:
        """Keep the cases of `rows`, with the memory's own γ, under `manifest` or its own.

        All tokens stay, so that every case can show what it read. `folder` is as in `merge`.
        Shapes: rows [n] int64, ascending.
        """
        return _write_and_open(
            folder,
            [replace(self, manifest=manifest or self.manifest)],
            self.provenance.subset(rows),
            rows=rows,
            gammas=self._gammas(),
            overwrite=overwrite,
        )

    def without(
        self,
        examples: Collection[int],
        *,
        folder: str | Path | None = None,
        overwrite: bool = False,
    ) -> RoutingMemory:
        """Make the memory as if it had never read `examples`.

        No key, value or token of them is left; what was written is read again to make sure. The
        other examples keep their numbers. γ is computed anew, except for a pruned memory, which
        keeps that of the whole; a calibration that read the examples is forgotten.

        Args:
            examples: Numbers of examples, in the order of the reference set.
            folder: As in `merge`.
            overwrite: As in `merge`.

        Returns:
            The memory without them.

        Raises:
            ConfigError: An example cannot be dropped, or the values were trained on all of them.
            MemoryFormatError: The memory is compressed.
        """
        self.full_layers()
        if self.manifest.values_trained:
            raise ConfigError(
                "The values of this memory were trained on all its examples, those to drop "
                "included. Build a memory of the others instead."
            )
        check_droppable(self.provenance, examples)
        provenance, rows = self.provenance.without(examples)
        rest = replace(self, manifest=self.manifest.without_calibration())
        gammas = self._gammas() if self.manifest.pruned else None
        written = _write_and_open(
            folder, [rest], provenance, rows=rows, gammas=gammas, overwrite=overwrite
        )
        _check_gone(written, self.provenance, examples)
        return written

    def _gammas(self) -> dict[int, float]:
        return {index: layer.gamma for index, layer in self.layers.items()}


def _write_and_open(
    folder: str | Path | None,
    memories: Sequence[RoutingMemory],
    provenance: Provenance,
    *,
    rows: Tensor | None = None,
    gammas: Mapping[int, float] | None = None,
    overwrite: bool,
) -> RoutingMemory:
    """Write as `write_cases` does, to `folder` or to one that lives as long as the memory."""
    holds = TemporaryFolder() if folder is None else None
    target = holds.path / "memory" if holds else Path(str(folder))
    write_cases(
        target,
        memories,
        provenance,
        rows=rows,
        gammas=gammas,
        overwrite=overwrite,
        durable=holds is None,
    )
    return replace(RoutingMemory.from_pretrained(target, verify=False), _holds=holds)


def _check_gone(written: RoutingMemory, before: Provenance, examples: Collection[int]) -> None:
    """Read what was written, checksums included, and raise if anything of `examples` is in it."""
    if written.folder is None:
        return
    opened = RoutingMemory.from_pretrained(written.folder)
    gone = torch.isin(before.example_of_window, torch.tensor(sorted(examples)))
    after = opened.provenance
    tokens = int(before.begin.diff()[~gone].sum())
    found = bool(torch.isin(owners(after), owners(before)[gone]).any())
    numbered = bool(torch.isin(after.example_of_window, before.example_of_window[gone]).any())
    if found or numbered or len(after.stream) != tokens:
        raise MemoryFormatError(
            f"{str(written.folder)!r} still holds tokens of an example that was to be dropped. "
            f"Delete it."
        )
