"""Compress a full memory: an index in place of keys, and how good that index is.

One layer at a time, so that no more than one is held in working memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.config import IndexConfig, RoutingConfig
from knn_moe.equations.similarity import SIMILARITIES
from knn_moe.errors import ConfigError, MemoryFormatError
from knn_moe.index import ExactIndex, KeyIndex
from knn_moe.index.exact import spread_evenly, squared_distance
from knn_moe.inference.arguments import MemoryLike, open_memory
from knn_moe.memory.compressed import CompressedLayer, IndexQuality
from knn_moe.memory.head_keys import HeadKeys, uses_head_keys
from knn_moe.memory.layers import LayerMemory
from knn_moe.memory.memory import RoutingMemory
from knn_moe.memory.writer import write_layers
from knn_moe.recall.layer import layer_gamma, name_values, open_layer, rows_of
from knn_moe.recall.neighbours import Neighbours, Widths, confidence_of
from knn_moe.recall.next_token import open_head_keys
from knn_moe.support.progress import OnProgress, Progress, ignore_progress

_SAMPLE: Final = 512  # keys that an index is tried on


def compress(
    memory: MemoryLike,
    index: IndexConfig | str,
    folder: str | Path,
    *,
    device: torch.device | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> RoutingMemory:
    """Write `memory` to `folder` with an index in place of its keys, and open it from there.

    The result serves the similarity that the memory's own routing names.

    Args:
        memory: A memory with keys, or the folder or hub id of one.
        index: The index, or its kind by name: "fast", "faiss-flat" or "ivfpq".
        folder: Where the compressed memory is written.
        device: Where indexes are made. None: the CPU.
        overwrite: Replace a memory that is in `folder`.
        on_progress: Called after each layer.

    Returns:
        The compressed memory.

    Raises:
        ConfigError: The index is "exact", which is the keys themselves.
        MemoryFormatError: The memory is empty or compressed already.
    """
    index = IndexConfig(kind=index) if isinstance(index, str) else index
    if index.kind == "exact":
        raise ConfigError("The exact index is the keys themselves. Choose another to compress.")
    memory = open_memory(memory)
    full = memory.full_layers()
    if not len(memory):
        raise MemoryFormatError(f"{memory!r} has no keys to compress. Use it as it is.")
    routing = replace(memory.routing, index=index)
    place = device or torch.device("cpu")

    def layers() -> Iterator[tuple[int, dict[str, Any], dict[str, Tensor]]]:
        for done, (number, layer) in enumerate(full.items(), start=1):
            gamma = _stored_gamma(memory, number, routing.similarity, place)
            widths = Widths.of(gamma, number, routing)
            small = compress_layer(layer, gamma, widths, routing, place)
            yield number, small.entry(), dict(small.tensors)
            on_progress(Progress("compressing", done, len(full)))

    manifest = replace(memory.manifest, routing=routing)
    write_layers(
        Path(folder),
        manifest,
        memory.provenance,
        layers(),
        head_keys=compress_head_keys(memory, index, place),
        overwrite=overwrite,
    )
    return RoutingMemory.from_pretrained(folder, verify=False)


def compress_layer(
    layer: LayerMemory, gamma: float, widths: Widths, routing: RoutingConfig, device: torch.device
) -> CompressedLayer:
    """Compress one layer to the index of `routing`, made on `device`.

    Args:
        layer: The cases.
        gamma: The layer's own γ, which is stored.
        widths: What `routing` makes of it, by which the index is measured.
        routing: The index, the similarity and K.
        device: Where the index is made.
    """
    if routing.index is None:
        raise ConfigError("compress_layer needs an index in the config: RoutingConfig(index=…).")
    index, values = open_layer(layer, routing, device)
    tensors = {f"index.{name}": tensor.cpu() for name, tensor in index.tensors().items()}
    tensors |= {f"values.{name}": tensor.cpu() for name, tensor in name_values(values).items()}
    return CompressedLayer(
        tensors=tensors,
        gamma=gamma,
        cases=len(layer),
        shape=layer.shape,
        index=routing.index,
        similarity=routing.similarity,
        quality=measure_index(index, layer.keys, widths, routing, device),
    )


def compress_head_keys(
    memory: RoutingMemory, config: IndexConfig, device: torch.device
) -> HeadKeys | None:
    """Put an index, made on `device`, in place of the head keys. None: the memory uses none."""
    if memory.head_keys is None or not uses_head_keys(memory.routing):
        return None
    index = open_head_keys(memory, config, device).index
    tensors = {name: tensor.cpu() for name, tensor in index.tensors().items()}
    return HeadKeys(tensors, memory.head_keys.gamma, config)


def measure_index(
    index: KeyIndex, keys: Tensor, widths: Widths, routing: RoutingConfig, device: torch.device
) -> IndexQuality:
    """Measure recall and the error of λ on evenly spaced keys, each without itself.

    Shapes: keys [M, d].
    """
    if len(keys) < 2:
        return IndexQuality(recall=1.0, confidence_error=0.0)
    similarity = SIMILARITIES[routing.similarity]
    sample = spread_evenly(_SAMPLE, len(keys))
    k = min(routing.k, len(keys) - 1)
    prepared = similarity.prepare(keys)
    queries = prepared[sample].to(device)
    exact = _nearest_others(ExactIndex(prepared.to(device)), queries, sample, k)
    found = _nearest_others(index, queries, sample, k)
    # Another key that is as near is as good; where nothing was found, no key is.
    reached, best = (
        squared_distance(queries, prepared[near.rows[:, 0].cpu()].to(device))
        for near in (found, exact)
    )
    hit = found.squared_distance[:, 0].isfinite() & (reached <= best)
    ours, theirs = (
        confidence_of(near.squared_distance.cpu(), widths, similarity) for near in (found, exact)
    )
    return IndexQuality(
        recall=round(float(hit.float().mean()), 4),
        confidence_error=round(float((ours - theirs).abs().mean()), 5),
    )


def _nearest_others(index: KeyIndex, queries: Tensor, sample: Tensor, k: int) -> Neighbours:
    """Find the k nearest of each sampled key, itself left out."""
    distance, places = index.search(queries, k + 1)
    rows = rows_of(index, places)
    itself = rows == sample.to(rows.device)[:, None]
    # The key itself goes last, whether it was found or not, and the last one is dropped.
    distance = distance.masked_fill(itself, float("inf"))
    order = torch.argsort(distance, dim=-1, stable=True)[:, :k]
    return Neighbours(distance.gather(1, order), rows.gather(1, order))


def _stored_gamma(
    memory: RoutingMemory, number: int, similarity: str, device: torch.device
) -> float:
    """Return the layer's γ from its own distances, whatever the memory's routing makes of it.

    Cosine has none, but its keys serve the RBF kernel on unit vectors as well.
    """
    prepare = SIMILARITIES[similarity].prepare
    rbf = (entry for entry in SIMILARITIES.values() if entry.uses_gamma)
    name = next(entry.name for entry in rbf if entry.prepare is prepare)
    return layer_gamma(memory, number, RoutingConfig(similarity=name), device)
