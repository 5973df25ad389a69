"""Whether a memory means what it says, after its form was found to be right (files.py).

Digest and checksums show that a memory is as it was written, not that it makes sense: whoever
writes one can compute them. Everything here raises MemoryFormatError. What is checked when:

- when a memory is opened, always: every field of the config, file names, the dtypes and shapes of
  all tensors against each other, and where keys come from;
- when it is opened with `verify`, and again when a layer is put on a device (recall/): all numbers,
  and every place that an index names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knn_moe.config import SIMILARITIES, IndexConfig, check_width
from knn_moe.errors import ConfigError, MemoryFormatError
from knn_moe.index.check import (
    FLOATS,
    LARGEST,
    check_contents,
    check_form,
    check_numbers,
    check_range,
    check_tensors,
    check_value_numbers,
    check_values,
)
from knn_moe.memory.compressed import CompressedLayer, IndexQuality
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.head_keys import HeadKeys
from knn_moe.memory.layers import LayerMemory
from knn_moe.memory.schema import read_fields, read_value
from knn_moe.reference.provenance import Provenance

_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in FLOATS)


@dataclass(frozen=True)
class _File:
    """What a config says of a file."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Full(_File):
    """What a config says of a layer with keys."""

    layer: int
    gamma: float


@dataclass(frozen=True)
class _Compressed(_Full):
    """What a config says of a layer whose keys became an index."""

    cases: int
    shape: tuple[int, int, str]
    index: IndexConfig
    similarity: str
    quality: IndexQuality


@dataclass(frozen=True)
class _Distilled(_Full):
    """What a config says of a layer that was distilled."""

    prototypes: int
    log_threshold: float


@dataclass(frozen=True)
class _Head(_File):
    """What a config says of head keys."""

    gamma: float
    index: IndexConfig


def check_config(config: Mapping[str, Any]) -> None:
    """Check what a config says of its files; `MemoryManifest.from_dict` checks the rest."""
    for name in ("keys", "examples", "bytes"):
        read_value(int, config.get(name), f"The config's {name}")
    read_fields(_File, config.get("tokens"), "The config's tokens", others=True)
    layers = read_value(tuple[Mapping[str, Any], ...], config.get("layers"), "The config's layers")
    for entry in layers:
        _check_entry(entry)
    numbers = [entry["layer"] for entry in layers]
    if not numbers or len(set(numbers)) < len(numbers):
        raise MemoryFormatError(f"The config names no layer, or one of them twice: {numbers[:99]}.")
    if len({_kind_of(entry) for entry in layers}) > 1:
        raise MemoryFormatError("The config has layers of different kinds.")
    if config.get("head_keys") is not None:
        head = read_fields(_Head, config["head_keys"], "The config's head_keys", others=True)
        _check_gamma(head.gamma, "The head")


def _check_entry(entry: Mapping[str, Any]) -> None:
    where = f"The config's entry of layer {entry.get('layer')!a}"
    told = read_fields(_kind_of(entry), entry, where, others=True)
    _check_gamma(told.gamma, where)
    if told.layer < 0:
        raise MemoryFormatError(f"{where} has a negative number.")
    if isinstance(told, _Distilled) and not (
        told.prototypes >= 1 and abs(told.log_threshold) <= LARGEST
    ):
        raise MemoryFormatError(f"{where} has no prototypes, or no finite threshold.")
    if isinstance(told, _Compressed):
        hidden, experts, dtype = told.shape
        if told.index.kind == "exact" or told.similarity not in SIMILARITIES:
            raise MemoryFormatError(f"{where} has no index or similarity that a memory can have.")
        if min(told.cases, hidden, experts) < 1 or dtype not in _DTYPES:
            raise MemoryFormatError(f"{where} has a shape that no layer has: {list(told.shape)}.")


def _kind_of(entry: Mapping[str, Any]) -> type[_Full]:
    if "index" in entry:
        return _Compressed
    return _Distilled if "prototypes" in entry else _Full


def _check_gamma(gamma: float, where: str) -> None:
    try:
        check_width("gamma", gamma)
    except ConfigError as error:
        raise MemoryFormatError(f"{where}: {error}") from None


def check_tokens(tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> None:
    """Check the reference tokens and each key's place in them, against the config's counts."""
    known = {name: tensors[name] for name in Provenance.__annotations__ if name in tensors}
    length, windows, cases = (
        known[name].numel() if name in known else 0
        for name in ("stream", "example_of_window", "key")
    )
    small, wide = (torch.int32,), (torch.int64,)
    forms = {
        "stream": (small, (length,)),
        "begin": (wide, (windows + 1,)),
        "example_of_window": (small, (windows,)),
        "offset_of_window": (small, (windows,)),
        "key": (wide, (cases,)),
    }
    check_tensors(known, forms, where)
    for name in ("stream", "example_of_window", "offset_of_window"):
        check_range(known[name], name, where, 0, torch.iinfo(torch.int32).max)
    begin = known["begin"]
    check_range(begin, "begin", where, 0, length)
    check_range(begin.diff(), "windows' lengths", where, 0, length)
    if (int(begin[0]), int(begin[-1])) != (0, length):
        raise MemoryFormatError(f"{where} has windows that do not hold all of its tokens.")
    check_range(known["key"], "key", where, 0, length - 1)
    examples = int(known["example_of_window"].unique().numel())
    if (config["keys"], config["examples"]) != (cases, examples):
        raise MemoryFormatError(
            f"{where} has {cases:,} keys of {examples:,} examples, and the config says "
            f"{config['keys']:,} of {config['examples']:,}."
        )


def check_layer_tensors(
    entry: Mapping[str, Any], tensors: Mapping[str, Tensor], cases: int, where: str
) -> None:
    """Check the dtypes and shapes of a layer's tensors, of a memory of `cases` cases."""
    if "prototypes" in entry:
        _check_distilled_tensors(tensors, entry["prototypes"], cases, where)
        return
    if "index" not in entry:
        hidden, experts = _width(tensors, "keys"), _width(tensors, "values")
        forms = {"keys": (FLOATS, (cases, hidden)), "values": ((torch.float32,), (cases, experts))}
        check_tensors(tensors, forms, where)
        if not hidden or not experts:
            raise MemoryFormatError(f"{where} has keys or values without numbers.")
        return
    layer = CompressedLayer.read(entry, tensors)
    if layer.cases != cases:
        raise MemoryFormatError(f"{where} has {layer.cases:,} cases, and the memory {cases:,}.")
    index, values = layer.part("index"), layer.part("values")
    if len(index) + len(values) < len(tensors):
        raise MemoryFormatError(f"{where} has tensors of neither index nor values.")
    check_form(index, layer.index, cases, layer.shape.hidden_size, where)
    check_values(values, layer.index, (cases, layer.shape.num_experts), where)


def _check_distilled_tensors(
    tensors: Mapping[str, Tensor], prototypes: int, cases: int, where: str
) -> None:
    hidden, experts = _width(tensors, "keys"), _width(tensors, "updates")
    forms = {
        "keys": (FLOATS, (prototypes, hidden)),
        "updates": ((torch.float32,), (prototypes, experts)),
        "linear": (FLOATS, (experts, hidden)),
        "cases": ((torch.int64,), (prototypes,)),
    }
    check_tensors(tensors, forms, where)
    if not hidden or not experts or tensors["linear"].dtype != tensors["keys"].dtype:
        raise MemoryFormatError(f"{where} has no numbers, or linear is of another dtype than keys.")
    check_range(tensors["cases"], "cases", where, 0, cases - 1)


def _width(tensors: Mapping[str, Tensor], name: str) -> int:
    return tensors[name].shape[-1] if name in tensors and tensors[name].ndim else 0


def check_head_tensors(head: HeadKeys, provenance: Provenance, where: str) -> None:
    """Check the dtypes and shapes of head keys: one for each case, or for each that a token
    followed."""
    told = int((provenance.following >= 0).sum())
    cases = len(provenance) if head.index.kind == "exact" else told
    check_form(head.tensors, head.index, cases, head.width, where)


def check_layer_contents(layer: LayerMemory | CompressedLayer | DistilledLayer, where: str) -> None:
    """Read all numbers of a layer whose form was checked."""
    if isinstance(layer, CompressedLayer):
        check_contents(layer.part("index"), layer.index, layer.cases, where)
        check_value_numbers(layer.part("values"), where)
    elif isinstance(layer, DistilledLayer):
        for name in ("keys", "updates", "linear"):
            check_numbers(layer.tensors[name], name, where)
    else:
        check_numbers(layer.keys, "keys", where)
        check_numbers(layer.values, "values", where)


def check_head_contents(head: HeadKeys, provenance: Provenance, where: str) -> None:
    """Read all numbers of head keys whose form was checked."""
    told = int((provenance.following >= 0).sum())
    check_contents(head.tensors, head.index, told, where)
