"""The artefact: what a model remembers of a reference set, per layer.

Knows what a memory holds and whose it is. How it lies on disk is files.py's, how it gets there
is writer.py's, how it is used is handle.py's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from knn_moe.config import BuildConfig, RoutingConfig
from knn_moe.errors import ConfigError, MemoryFormatError, MemoryMismatchError
from knn_moe.memory import files
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.manifest import MemoryManifest, joined_scores
from knn_moe.memory.writer import (
    NOTHING_KNOWN,
    KnownGammas,
    LayerShape,
    MemoryWriter,
    scratch_beside,
    write_layers,
)
from knn_moe.reference.provenance import Provenance, check_droppable, concatenate, owners
from knn_moe.reference.windows import Span
from knn_moe.routers.fingerprint import ModelIdentity
from knn_moe.support.files import TemporaryFolder

_ROWS: Final = 4096  # copied at a time


@dataclass(frozen=True)
class LayerMemory:
    """One layer's cases. Shapes: keys [M, d], the model's dtype; values [M, N], fp32."""

    keys: Tensor
    values: Tensor
    gamma: float  # of the RBF kernel, from these keys' own distances
    gammas: tuple[float, ...] = ()  # of each domain, where there are several

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
    manifest: MemoryManifest
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
        return self.manifest.base_model

    @property
    def build(self) -> BuildConfig:
        return self.manifest.build

    @property
    def routing(self) -> RoutingConfig:
        """How the memory is meant to be used; `attach` takes this by default."""
        return self.manifest.routing

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
        config = files.read_config(folder)
        entries = [config["tokens"], *config["layers"]]
        with ThreadPoolExecutor() as pool:
            check = partial(files.check_file, folder, contents=verify)
            tokens, *layers = pool.map(check, entries)
        return cls(
            layers={
                entry["layer"]: _read_layer(entry, files.read_tensors(path))
                for entry, path in zip(config["layers"], layers, strict=True)
            },
            provenance=Provenance(**files.read_tensors(tokens)),
            manifest=MemoryManifest.from_dict(config),
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
            write_layers(Path(folder), self.manifest, self.provenance, layers, overwrite=overwrite)
            return
        _write(Path(folder), [self], self.provenance, known=self._gammas(), overwrite=overwrite)

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
        self,
        *others: RoutingMemory,
        folder: str | Path | None = None,
        overwrite: bool = False,
        by_domain: bool | None = None,
    ) -> RoutingMemory:
        """One memory of the cases of all.

        `by_domain`: each memory is a domain whose cases keep its γ, one that was merged so brings
        its own; or γ is one, taken from their joint distances. None: as they are, by domain if any
        of them is. What pays is in docs/pruning.md.
        What the memory says of its build and use is the first one's; what a calibration found for
        that one alone is forgotten, and its preset's routing is back.
        Streamed to `folder` and opened from there; without one, to a temporary folder that lives
        as long as the memory.
        """
        for memory in (self, *others):
            memory.full_layers()
        for other in others:
            _check_mergeable(self, other)
        manifests = [memory.manifest for memory in (self, *others)]
        manifest = replace(
            self.manifest.uncalibrated(),
            pruned=_pruned_in_all((self, *others)),
            learned=any(manifest.learned for manifest in manifests),
        )
        # A memory of nothing is no domain.
        filled = [memory for memory in others if len(memory.provenance.example_of_window)]
        memories = [replace(self, manifest=manifest), *filled]
        provenance = concatenate([memory.provenance for memory in memories])
        if by_domain is None:
            by_domain = any(memory.provenance.num_domains > 1 for memory in memories)
        if not by_domain:
            provenance = provenance.of_one_domain()
        known = KnownGammas(domains=_domains_of_all(memories))
        return _written(folder, memories, provenance, known=known, overwrite=overwrite)

    def subset(
        self,
        rows: Tensor,
        *,
        manifest: MemoryManifest | None = None,
        folder: str | Path | None = None,
        overwrite: bool = False,
    ) -> RoutingMemory:
        """The cases of `rows` with the memory's own γ, under `manifest` or its own.

        All tokens stay, so that every case can say what it read. To `folder` as in `merge`.
        Shapes: rows [n] int64, ascending.
        """
        chosen = replace(self, manifest=manifest or self.manifest)
        provenance = self.provenance.subset(rows)
        return _written(
            folder, [chosen], provenance, rows=rows, known=self._gammas(), overwrite=overwrite
        )

    def without(
        self,
        examples: Collection[int],
        *,
        folder: str | Path | None = None,
        overwrite: bool = False,
    ) -> RoutingMemory:
        """The memory as if it had never read `examples`, by number: no key, value or token of
        them is left, and what is written is read again to make sure.

        γ is computed anew, that of each domain too, but for a pruned memory, which keeps those of
        the whole; a calibration that read them is forgotten. The others keep their numbers. To
        `folder` as in `merge`.
        """
        self.full_layers()
        if self.manifest.learned:
            raise ConfigError(
                "The values of this memory were fitted to all its examples, those to drop "
                "included: build a memory of the others instead."
            )
        check_droppable(self.provenance, examples)
        provenance, rows = self.provenance.without(examples)
        rest = replace(self, manifest=self.manifest.uncalibrated())
        left = self.provenance.domains_without(examples)
        known = self._gammas(left) if self.manifest.pruned else NOTHING_KNOWN
        written = _written(folder, [rest], provenance, rows=rows, known=known, overwrite=overwrite)
        _check_gone(written, self.provenance, examples)
        return written

    def _gammas(self, left: Sequence[int] | None = None) -> KnownGammas:
        """Its own; if only the domains `left` are, theirs. The last one's γ is all there is."""
        joint = {index: layer.gamma for index, layer in self.layers.items()}
        domains = {index: layer.gammas for index, layer in self.layers.items() if layer.gammas}
        if left is not None:
            domains = {index: tuple(own[one] for one in left) for index, own in domains.items()}
            if len(left) == 1:
                joint |= {index: own for index, (own,) in domains.items()}
        return KnownGammas(joint, domains)


def _written(
    folder: str | Path | None,
    memories: Sequence[RoutingMemory],
    provenance: Provenance,
    *,
    rows: Tensor | None = None,
    known: KnownGammas,
    overwrite: bool,
) -> RoutingMemory:
    """What `_write` wrote, opened: in `folder`, or in one that lives as long as the memory."""
    holds = TemporaryFolder() if folder is None else None
    target = holds.path / "memory" if holds else Path(str(folder))
    _write(target, memories, provenance, rows=rows, known=known, overwrite=overwrite)
    return replace(RoutingMemory.from_pretrained(target, verify=False), _holds=holds)


def _write(
    folder: Path,
    memories: Sequence[RoutingMemory],
    provenance: Provenance,
    *,
    rows: Tensor | None = None,
    known: KnownGammas,
    overwrite: bool,
) -> None:
    """The cases of `memories`, one after the other, as one memory in `folder`; with `rows`, those
    of one memory only. γ that is not `known` is computed."""
    files.refuse_existing(folder, overwrite=overwrite)
    shapes = {index: layer.shape for index, layer in memories[0].layers.items()}
    with scratch_beside(folder) as scratch:
        writer = MemoryWriter(scratch, provenance, shapes)
        row = 0
        for memory in memories:
            for index, layer in memory.full_layers().items():
                for start, part in _parts(len(memory), rows):
                    keys = layer.keys[part].cpu()
                    span = Span(row + start, 0, len(keys))
                    writer.write(index, "keys", keys, [span])
                    writer.write(index, "values", layer.values[part].cpu(), [span])
            row += len(memory)
        writer.finish(memories[0].manifest, folder, known=known, overwrite=overwrite)


def _parts(cases: int, rows: Tensor | None) -> Iterator[tuple[int, slice | Tensor]]:
    """Some cases at a time, all or those of `rows`: where they begin in what is written, and
    which they are."""
    if rows is None:
        for start in range(0, cases, _ROWS):
            yield start, slice(start, start + _ROWS)
    else:
        for start in range(0, len(rows), _ROWS):
            yield start, rows[start : start + _ROWS]


def _check_gone(written: RoutingMemory, before: Provenance, examples: Collection[int]) -> None:
    """Read what was written, checksums and all, and find nothing of `examples` in it."""
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
            f"{str(written.folder)!r} still holds tokens of an example that was to go: delete it."
        )


def _read_layer(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Layer:
    if "index" in entry:
        return CompressedLayer.read(entry, tensors)
    return LayerMemory(gamma=entry["gamma"], gammas=tuple(entry.get("gammas", ())), **tensors)


def _domains_of_all(memories: Sequence[RoutingMemory]) -> dict[int, tuple[float, ...]]:
    """γ of their domains, one memory's after the other's, by layer."""
    return {
        index: tuple(
            gamma
            for layer in (memory.layers[index] for memory in memories)
            for gamma in layer.gammas or (layer.gamma,)
        )
        for index in memories[0].layers
    }


def _pruned_in_all(memories: Sequence[RoutingMemory]) -> dict[str, Any] | None:
    """What was left of all of them together, if of any some was pruned."""
    cut = [memory.manifest.pruned for memory in memories if memory.manifest.pruned]
    if not cut:
        return None
    cases = sum((memory.manifest.pruned or {}).get("cases", len(memory)) for memory in memories)
    score = joined_scores([facts["score"] for facts in cut])
    rounds = max(facts["rounds"] for facts in cut)
    return {"cases": cases, "kept": sum(map(len, memories)), "score": score, "rounds": rounds}


def _check_mergeable(first: RoutingMemory, other: RoutingMemory) -> None:
    if first.base_model.fingerprint != other.base_model.fingerprint:
        raise MemoryMismatchError(
            f"These memories belong to different models, {first.base_model} and "
            f"{other.base_model}, and cannot be merged."
        )
    if first.build.tokens != other.build.tokens:
        raise MemoryMismatchError(
            f"One of these memories is of {first.build.tokens} tokens and the other of "
            f"{other.build.tokens} ones: build them alike to merge them."
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
