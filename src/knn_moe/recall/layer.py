"""One layer's memory on a router's device: its index, values and widths, and what they make of a
router call (§4.2).

Static shapes: runs eagerly, under torch.compile and in CUDA graphs. On a GPU the `fast` index has
kernels that do all of it in two launches (index/fast/fused.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from knn_moe.config import IndexConfig, RoutingConfig
from knn_moe.equations.similarity import SIMILARITIES
from knn_moe.errors import ConfigError, MemoryMismatchError
from knn_moe.index import FastIndex, KeyIndex, build_index, load_index
from knn_moe.index.check import check_numbers
from knn_moe.index.fast.fused import MOST_RANKED, FusedRecall, kernels_usable
from knn_moe.index.fast.tensors import KernelConfig
from knn_moe.index.fast.values import PackedValues
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.gamma import estimate_gammas
from knn_moe.memory.layers import LayerMemory
from knn_moe.memory.memory import RoutingMemory
from knn_moe.memory.validate import check_layer_contents
from knn_moe.recall.distilled import DistilledRecall
from knn_moe.recall.neighbours import Neighbours, Widths, confidence_of, weigh, weights_of
from knn_moe.recall.random_cases import draw_cases

_WHERE: Final = "A layer of this memory"
UNITS: Final = 2**32  # confidences are summed as whole numbers of 1 / UNITS


class LayerRecall(nn.Module):
    """Keys, values and widths of one layer, on the router's device.

    A module only so that its tensors are buffers, which compilers treat as static; it is no part
    of the model.

    Args:
        layer: The cases.
        widths: Kernel widths, as numbers.
        config: K, the similarity and the index.
        device: Where the router runs.
        random_seed: Recall K cases drawn at random by this seed instead of the nearest: a control.
        count_top: Count changes among this many top logits, where kernels can.
    """

    gamma: Tensor
    confidence_gamma: Tensor
    confidence_factor: Tensor
    uncounted: Tensor

    def __init__(
        self,
        layer: LayerMemory | CompressedLayer,
        widths: Widths,
        config: RoutingConfig,
        device: torch.device,
        *,
        random_seed: int | None = None,
        count_top: int = 0,
    ) -> None:
        super().__init__()
        self.similarity = SIMILARITIES[config.similarity]
        self.cases = len(layer)
        self.k = min(config.k, self.cases)
        self.random_seed = random_seed
        self.dtype = layer.shape.dtype
        self.index, values = open_layer(layer, config, device)
        for name, number in widths._asdict().items():
            width = torch.tensor(number, dtype=torch.float32, device=device)
            self.register_buffer(name, width, persistent=False)
        nothing = torch.zeros(4, dtype=torch.int64, device=device)
        self.register_buffer("uncounted", nothing, persistent=False)
        self.value_names = list(name_values(values))
        for name, tensor in name_values(values).items():
            self.register_buffer(name, tensor, persistent=False)
        self.fused: FusedRecall | None = None
        if isinstance(self.index, FastIndex) and isinstance(values, PackedValues):
            self._fuse(self.index, values, count_top)

    def _fuse(self, index: FastIndex, values: PackedValues, count_top: int) -> None:
        if not kernels_usable(self.gamma.device, self.k):
            return
        cosine = 0 if self.similarity.uses_gamma else 1
        top = count_top if len(values.centre) <= MOST_RANKED else 0
        widths = torch.stack([self.gamma, self.confidence_gamma, self.confidence_factor])
        kernel_config = KernelConfig(self.k, index.probes, cosine, top)
        fused = FusedRecall(index, values, widths, kernel_config)
        index.kernel_search = fused.search
        if index.keys is None and self.random_seed is None:
            self.fused = fused

    def check_values_fit(self, dtype: torch.dtype) -> None:
        """Raise MemoryMismatchError if values are beyond the router's own `dtype`.

        Only fp16 is that small: the bounds of index/check.py fit in the others.
        """
        if dtype != torch.float16:
            return
        tensors = [self.get_buffer(name) for name in self.value_names]
        largest = tensors[0].abs().amax() if len(tensors) == 1 else PackedValues(*tensors).largest()
        if float(largest) > torch.finfo(dtype).max:
            raise MemoryMismatchError(
                f"The memory has values up to {float(largest):g}, which float16 cannot hold. Load "
                f"the model in bfloat16 or float32."
            )

    @property
    def widths(self) -> Widths:
        """The kernel widths, as tensors on the device."""
        return Widths(self.gamma, self.confidence_gamma, self.confidence_factor)

    def forward(
        self,
        inputs: Tensor,
        logits: Tensor,
        counts: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed logits and λ. Kernels, where there are any, add the call to `counts`.

        Shapes: inputs [T, d]; logits [T, N]; counts [4], see inference/hooks.py; real [T] bool,
        None: all are. Result [T, N] in the logits' dtype, [T] fp32.
        """
        if self.fused is not None:
            counted = self.uncounted if counts is None else counts
            return self.fused.forward(self._queries(inputs), logits, counted, real)
        near = self._recall(inputs)
        values = self._values(near.rows)
        recalled = weigh(near.squared_distance, values, self.widths, self.similarity)
        return recalled.mix(logits), recalled.confidence

    def counts_call(self, inputs: Tensor, logits: Tensor) -> bool:
        """Return whether `forward` counts this call itself: calls, tokens and confidence."""
        return self.fused is not None

    @property
    def counts_changes(self) -> bool:
        """Whether it also counts the tokens whose experts changed."""
        return self.fused is not None and self.fused.config.top_k > 0

    def nearest(self, inputs: Tensor) -> Neighbours:
        """Find the K cases that are recalled, with rows of the memory. Shapes: inputs [T, d]."""
        near = self._recall(inputs)
        return near._replace(rows=rows_of(self.index, near.rows))

    def recall_weighed(self, inputs: Tensor) -> tuple[Neighbours, Tensor]:
        """Find the K cases that are recalled, and each one's share of the proposal [T, K]."""
        near = self.nearest(inputs)
        return near, self.weights(near.squared_distance)

    def nearest_of(self, inputs: Tensor, k: int) -> Neighbours:
        """Find the k nearest cases, for another K and never at random. Shapes: inputs [T, d]."""
        distance, places = self.index.search(self._queries(inputs), min(k, self.cases))
        return Neighbours(distance, rows_of(self.index, places))

    def weights(self, squared_distance: Tensor) -> Tensor:
        """Return each neighbour's share of the proposal. Shapes: [T, K] → [T, K]."""
        return weights_of(squared_distance, self.widths, self.similarity)

    def confidence(self, squared_distance: Tensor) -> Tensor:
        """Return λ of each token. Shapes: [T, K] → [T], in [0, 1]."""
        return confidence_of(squared_distance, self.widths, self.similarity)

    def _recall(self, inputs: Tensor) -> Neighbours:
        """Find the K nearest, with places in the index; random ones keep their distances."""
        queries = self._queries(inputs)
        near = Neighbours(*self.index.search(queries, self.k))
        if self.random_seed is None:
            return near
        return near._replace(rows=draw_cases(queries, self.k, self.cases, self.random_seed))

    def _queries(self, inputs: Tensor) -> Tensor:
        return self.similarity.prepare(inputs.to(self.dtype))

    def _values(self, places: Tensor) -> Tensor:
        tensors = [self.get_buffer(name) for name in self.value_names]
        return tensors[0][places] if len(tensors) == 1 else PackedValues(*tensors).at(places)


Recall: TypeAlias = LayerRecall | DistilledRecall


@dataclass(frozen=True)
class RouterCall:
    """What happened in one router call.

    Shapes: inputs [T, d]; logits, the router's own, and mixed [T, N]; before, after [T, top_k], the
    experts of either, ascending; confidence [T].
    """

    layer: int
    recall: Recall
    inputs: Tensor
    logits: Tensor
    mixed: Tensor
    before: Tensor
    after: Tensor
    confidence: Tensor


def open_layer(
    layer: LayerMemory | CompressedLayer, config: RoutingConfig, device: torch.device
) -> tuple[KeyIndex, Tensor | PackedValues]:
    """Return the index of a layer and its values, in the index's order, on `device`.

    Raises:
        ConfigError: A compressed layer cannot serve the similarity or the index of `config`.
        MemoryFormatError: A number is not finite, or an index names a place that is not there.
    """
    if isinstance(layer, CompressedLayer):
        check_layer_contents(layer, _WHERE)
        index = load_index(layer.part("index"), index_of(layer, config), device)
        kept = {name: tensor.to(device) for name, tensor in layer.part("values").items()}
        return index, kept["values"] if "values" in kept else PackedValues(**kept)
    index_config = config.index or IndexConfig()
    keys = SIMILARITIES[config.similarity].prepare(layer.keys)
    if index_config.kind in ("exact", "fast"):  # FAISS copies keys itself, some at a time
        keys = keys.to(device)
    values = layer.values.to(device)
    check_numbers(keys, "keys", _WHERE)
    check_numbers(values, "values", _WHERE)
    index = build_index(keys, index_config, device)
    if index_config.kind != "fast":
        return index, values
    rows = rows_of(index, torch.arange(len(values), device=device))
    return index, PackedValues.of(values[rows], index_config.value_bits)


def rows_of(index: KeyIndex, places: Tensor) -> Tensor:
    """Return the memory's rows of places in an index. Shapes: places [...] → [...] int64."""
    return index.rows[places].long() if isinstance(index, FastIndex) else places


def name_values(values: Tensor | PackedValues) -> dict[str, Tensor]:
    """Return the tensors that values consist of, by name."""
    return values._asdict() if isinstance(values, PackedValues) else {"values": values}


def layer_gamma(
    memory: RoutingMemory, index: int, config: RoutingConfig, device: torch.device
) -> float:
    """Return γ of a layer: as configured, as stored for the RBF kernel, or estimated from the keys
    as the similarity prepares them."""
    similarity = SIMILARITIES[config.similarity]
    layer = memory.layers[index]
    if not similarity.uses_gamma:
        return 1.0
    if config.gamma is not None:
        return config.gamma
    if config.similarity == "rbf" or isinstance(layer, CompressedLayer):
        return layer.gamma
    keys = {index: similarity.prepare(layer.keys)}
    return estimate_gammas(keys, memory.provenance, device)[index]


def index_of(layer: CompressedLayer, config: RoutingConfig) -> IndexConfig:
    """Return the compressed layer's own index, with the probes that `config` wants.

    Raises:
        ConfigError: The layer was compressed for another index or similarity.
    """
    wanted, own = config.index, layer.index
    prepared = SIMILARITIES[layer.similarity].prepare
    if SIMILARITIES[config.similarity].prepare is not prepared:
        raise ConfigError(
            f"This memory was compressed for {layer.similarity!r} similarity and cannot serve "
            f"{config.similarity!r}. Compress the full memory again for that one."
        )
    if wanted is None:
        return own
    if wanted.kind != own.kind or (wanted.rerank and not own.rerank):
        shown = f"{wanted.kind}{' with rerank' if wanted.rerank else ''}"
        raise ConfigError(
            f"This memory was compressed as {own.kind!r} and cannot be searched as {shown!r}. "
            f"Leave the index out, or compress the full memory again."
        )
    usual = IndexConfig(kind=own.kind)
    for name in ("dims", "bits", "value_bits"):
        value, has = getattr(wanted, name), getattr(own, name)
        if value not in (has, getattr(usual, name)):
            raise ConfigError(
                f"This memory was compressed with {name}={has} and cannot be searched with "
                f"{name}={value}. Leave it out, or compress the full memory again."
            )
    return wanted
