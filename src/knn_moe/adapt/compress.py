"""Make a compressed memory of a full one: an index instead of keys, and how good it is.

One layer at a time, so that no more than one is held in working memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.config import RoutingConfig
from knn_moe.equations.mixing import confidence
from knn_moe.equations.similarity import SIMILARITIES
from knn_moe.errors import ConfigError, MemoryFormatError
from knn_moe.index import ExactIndex, IndexConfig, KeyIndex
from knn_moe.index.exact import squared_distance
from knn_moe.index.fast.values import PackedValues
from knn_moe.memory.compressed import CompressedLayer, IndexQuality
from knn_moe.memory.gamma import Gammas
from knn_moe.memory.memory import LayerMemory, RoutingMemory
from knn_moe.memory.writer import write_layers
from knn_moe.recall.recall import Widths, layer_gammas, layer_widths, open_layer, rows_of

_SAMPLE: Final = 512  # keys that an index is tried on


def compress(
    memory: RoutingMemory,
    index: IndexConfig | str,
    folder: str | Path,
    *,
    device: torch.device | None = None,
    overwrite: bool = False,
    on_layer: Callable[[int], None] = lambda index: None,
) -> RoutingMemory:
    """Write `memory` to `folder` with `index` in the keys' place, and open it from there.

    It serves the similarity that the memory's own routing names. Streamed, layer by layer; made
    on `device`, the CPU unless told otherwise.
    """
    index = IndexConfig(kind=index) if isinstance(index, str) else index
    if index.kind == "exact":
        raise ConfigError("The exact index is the keys themselves: choose another to compress.")
    full = memory.full_layers()
    if not len(memory):
        raise MemoryFormatError(f"{memory!r} has no keys to compress: use it as it is.")
    routing = replace(memory.routing, index=index)
    place = device or torch.device("cpu")
    by_domain = routing.gamma is None and SIMILARITIES[routing.similarity].uses_gamma

    def layers() -> Iterator[tuple[int, dict[str, Any], dict[str, Tensor]]]:
        for number, layer in full.items():
            gammas = _own_gammas(memory, number, routing.similarity, place)
            widths = layer_widths(gammas.joint, number, routing)
            ratio = gammas.ratio(memory.provenance) if by_domain else None
            small = compress_layer(layer, gammas, widths, routing, place, ratio)
            yield number, small.entry(), dict(small.tensors)
            on_layer(number)

    manifest = replace(memory.manifest, routing=routing)
    write_layers(Path(folder), manifest, memory.provenance, layers(), overwrite=overwrite)
    return RoutingMemory.from_pretrained(folder, verify=False)


def compress_layer(
    layer: LayerMemory,
    gammas: Gammas,
    widths: Widths,
    routing: RoutingConfig,
    device: torch.device,
    ratio: Tensor | None = None,
) -> CompressedLayer:
    """One layer, as `routing` says, made on `device`. `gammas` are the layer's own, unscaled;
    `widths` and `ratio` [M], see recall.py, what `routing` makes of them."""
    if routing.index is None:
        raise ConfigError("A layer is compressed as some index: RoutingConfig(index=…).")
    index, values = open_layer(layer, routing, device)
    named = values._asdict() if isinstance(values, PackedValues) else {"values": values}
    tensors = {f"index.{name}": tensor.cpu() for name, tensor in index.tensors().items()}
    tensors |= {f"values.{name}": tensor.cpu() for name, tensor in named.items()}
    return CompressedLayer(
        tensors=tensors,
        gamma=gammas.joint,
        gammas=gammas.domains,
        cases=len(layer),
        shape=layer.shape,
        index=routing.index,
        similarity=routing.similarity,
        quality=measure(index, layer.keys, widths, routing, device, ratio),
    )


def measure(
    index: KeyIndex,
    keys: Tensor,
    widths: Widths,
    routing: RoutingConfig,
    device: torch.device,
    ratio: Tensor | None = None,
) -> IndexQuality:
    """Recall and λ error on evenly spaced keys, each without itself.

    Shapes: keys [M, d]; ratio [M], as LayerRecall's.
    """
    if len(keys) < 2:
        return IndexQuality(recall=1.0, confidence_error=0.0)
    similarity = SIMILARITIES[routing.similarity]
    width = torch.tensor(widths.confidence_gamma)
    count = min(_SAMPLE, len(keys))
    sample = torch.arange(count) * len(keys) // count
    k = min(routing.k, len(keys) - 1)
    prepared = similarity.prepare(keys)
    queries = prepared[sample].to(device)
    exact, nearest = _others(ExactIndex(prepared.to(device)), queries, sample, k)
    found, rows = _others(index, queries, sample, k)
    # Another key that is as near is as good; where nothing was found, no key is.
    reached, best = (
        squared_distance(queries, prepared[near[:, 0].cpu()].to(device)) for near in (rows, nearest)
    )
    hit = found[:, 0].isfinite() & (reached <= best)
    if ratio is not None:
        found, exact = found.cpu() * ratio[rows.cpu()], exact.cpu() * ratio[nearest.cpu()]
    lambdas = [confidence(similarity.log(part.cpu(), width)) for part in (found, exact)]
    return IndexQuality(
        recall=round(float(hit.float().mean()), 4),
        confidence_error=round(
            widths.confidence_factor * float((lambdas[0] - lambdas[1]).abs().mean()), 5
        ),
    )


def _others(index: KeyIndex, queries: Tensor, sample: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest of each sampled key, itself left out: squared distances and rows [T, k]."""
    distance, places = index.search(queries, k + 1)
    rows = rows_of(index, places)
    itself = rows == sample.to(rows.device)[:, None]
    # Itself goes last, whether it was found or not, and the last is dropped.
    distance = distance.masked_fill(itself, float("inf"))
    order = torch.argsort(distance, dim=-1, stable=True)[:, :k]
    return distance.gather(1, order), rows.gather(1, order)


def _own_gammas(
    memory: RoutingMemory, number: int, similarity: str, device: torch.device
) -> Gammas:
    """The layer's γ from its own distances, whatever the memory's routing makes of it.

    Cosine has none, but its keys serve the RBF widths on unit vectors as well.
    """
    prepare = SIMILARITIES[similarity].prepare
    widths = (entry for entry in SIMILARITIES.values() if entry.uses_gamma)
    name = next(entry.name for entry in widths if entry.prepare is prepare)
    return layer_gammas(memory, number, RoutingConfig(similarity=name), device)
