"""Open the folder of a memory: its files first (files.py), then what they mean (validate.py)."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from knn_moe.errors import MemoryFormatError
from knn_moe.memory import files, validate
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.head_keys import HeadKeys
from knn_moe.memory.layers import LayerMemory
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.reference.provenance import Provenance


class Contents(NamedTuple):
    """What a folder holds, by the fields of a RoutingMemory."""

    layers: dict[int, LayerMemory | CompressedLayer | DistilledLayer]
    provenance: Provenance
    manifest: MemoryManifest
    head_keys: HeadKeys | None


def read_folder(folder: Path, *, verify: bool) -> Contents:
    """Map the files of a memory after checking them; `verify` reads them all.

    If a writer replaces the folder meanwhile, the new memory is opened.

    Raises:
        MemoryFormatError: There is no memory, or not one that can be used.
    """
    while True:
        version = files.version_of(folder)
        try:
            contents = _read(folder, verify=verify)
        except (MemoryFormatError, OSError):
            if files.version_of(folder) == version:
                raise
        else:
            if files.version_of(folder) == version:
                return contents


def _read(folder: Path, *, verify: bool) -> Contents:
    config = files.read_config(folder)
    try:
        validate.check_config(config)
        manifest = MemoryManifest.from_dict(config)
    except MemoryFormatError as error:
        path = folder / files.CONFIG_FILE
        raise MemoryFormatError(f"{str(path)!r} makes no sense. {error}") from None
    head = config.get("head_keys")
    entries = [config["tokens"], *config["layers"], *([head] if head else [])]
    with ThreadPoolExecutor() as pool:
        check = partial(files.check_file, folder, contents=verify)
        tokens, *paths = pool.map(check, entries)
    provenance = _read_tokens(tokens, config)
    layers = {
        entry["layer"]: _read_layer(entry, path, len(provenance), verify=verify)
        for entry, path in zip(config["layers"], paths, strict=False)
    }
    head_keys = _read_head(head, paths[-1], provenance, verify=verify) if head else None
    return Contents(layers, provenance, manifest, head_keys)


def _read_tokens(path: Path, config: Mapping[str, Any]) -> Provenance:
    tensors = files.read_tensors(path)
    validate.check_tokens(tensors, config, repr(str(path)))
    return Provenance.from_tensors(tensors)


def _read_layer(
    entry: Mapping[str, Any], path: Path, cases: int, *, verify: bool
) -> LayerMemory | CompressedLayer | DistilledLayer:
    tensors, where = files.read_tensors(path), repr(str(path))
    validate.check_layer_tensors(entry, tensors, cases, where)
    layer: LayerMemory | CompressedLayer | DistilledLayer
    if "index" in entry:
        layer = CompressedLayer.read(entry, tensors)
    elif "prototypes" in entry:
        layer = DistilledLayer.read(entry, tensors)
    else:
        layer = LayerMemory(gamma=entry["gamma"], **tensors)
    if verify:
        validate.check_layer_contents(layer, where)
    return layer


def _read_head(
    entry: Mapping[str, Any], path: Path, provenance: Provenance, *, verify: bool
) -> HeadKeys:
    head, where = HeadKeys.read(entry, files.read_tensors(path)), repr(str(path))
    validate.check_head_tensors(head, provenance, where)
    if verify:
        validate.check_head_contents(head, provenance, where)
    return head
