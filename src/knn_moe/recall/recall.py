"""One layer's memory at work: search, similarity, proposal, confidence, mixing (§4.2).

Tensors in, tensors out, static shapes: runs eagerly, under torch.compile and in CUDA graphs. On a
GPU the `fast` index brings kernels that do all of it (index/fused.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from knn_moe.config import RoutingConfig
from knn_moe.equations.mixing import confidence, mix_logits, propose_logits
from knn_moe.equations.similarity import SIMILARITIES
from knn_moe.errors import ConfigError
from knn_moe.index import FastIndex, IndexConfig, KeyIndex, build_index, load_index
from knn_moe.index.fast.fused import MOST_RANKED, FusedRecall, kernels_usable
from knn_moe.index.fast.tensors import KernelConfig
from knn_moe.index.fast.values import PackedValues
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.gamma import Gammas, estimate_by_domain, estimate_gamma
from knn_moe.memory.memory import Layer, RoutingMemory
from knn_moe.recall.random_cases import draw_cases

UNITS: Final = 2**32  # confidences are summed as whole numbers of 1 / UNITS


class Widths(NamedTuple):
    """One layer's: γ where neighbours are weighed, γ where λ is taken from them, λ's factor."""

    gamma: float
    confidence_gamma: float
    confidence_factor: float = 1.0

    @classmethod
    def single(cls, gamma: float) -> Widths:
        """The paper's: one γ for both."""
        return cls(gamma, gamma)


class LayerRecall(nn.Module):
    """Keys, values and kernel of one layer, on the router's device.

    A module only so that its tensors are buffers, which compilers treat as static; it is no part
    of the model.
    """

    gamma: Tensor
    confidence_gamma: Tensor
    confidence_factor: Tensor
    uncounted: Tensor
    ratio: Tensor | None

    def __init__(
        self,
        layer: Layer,
        kernel: Widths,
        config: RoutingConfig,
        device: torch.device,
        *,
        count_top: int = 0,
        ratio: Tensor | None = None,
    ) -> None:
        """`count_top`: count changes among as many top logits, where kernels can. `ratio` [M]: γ of
        each case's domain to the layer's, by which its d² is multiplied; None: one γ for all."""
        super().__init__()
        self.similarity = SIMILARITIES[config.similarity]
        self.kernel = kernel
        self.cases = len(layer)
        self.k = min(config.k, self.cases)
        self.drawn = config.drawn
        self.dtype = layer.shape.dtype
        self.index, values = open_layer(layer, config, device)
        for name, number in kernel._asdict().items():
            self.register_buffer(name, torch.tensor(number, device=device), persistent=False)
        if ratio is not None:
            ratio = ratio.to(device)[rows_of(self.index, torch.arange(self.cases, device=device))]
        self.register_buffer("ratio", ratio, persistent=False)
        nothing = torch.zeros(4, dtype=torch.int64, device=device)
        self.register_buffer("uncounted", nothing, persistent=False)
        self.value_names = list(named_values(values))
        for name, tensor in named_values(values).items():
            self.register_buffer(name, tensor, persistent=False)
        self.fused: FusedRecall | None = None
        if isinstance(self.index, FastIndex) and isinstance(values, PackedValues):
            self._fuse(self.index, values, count_top)

    def _fuse(self, index: FastIndex, values: PackedValues, count_top: int) -> None:
        if not kernels_usable(self.gamma.device, self.k):
            return
        cosine = 0 if self.similarity.uses_gamma else 1
        top = count_top if len(values.centre) <= MOST_RANKED else 0
        kernel = torch.stack([self.gamma, self.confidence_gamma, self.confidence_factor])
        fused = FusedRecall(index, values, kernel, KernelConfig(self.k, index.probes, cosine, top))
        index.kernel_search = fused.search
        if index.keys is None and self.drawn is None and self.ratio is None:
            self.fused = fused

    def forward(
        self,
        inputs: Tensor,
        logits: Tensor,
        counts: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mixed logits and confidence. Kernels, where there are any, add the call to `counts`.

        Shapes: inputs [T, d]; logits [T, N]; counts [4], see hooks.Counts; real [T] bool, None:
        all are → [T, N] in the logits' dtype, [T] fp32.
        """
        if self.fused is not None:
            counted = self.uncounted if counts is None else counts
            return self.fused.forward(self._queries(inputs), logits, counted, real)
        squared_distance, places = self._recalled(inputs)
        log_similarity = self.log_similarity(squared_distance)
        proposal = propose_logits(self._values(places), log_similarity)
        weight = self.confidence(squared_distance)
        return mix_logits(logits.float(), proposal, weight).to(logits.dtype), weight

    @property
    def counts(self) -> bool:
        """Whether `forward` counts calls, tokens and confidence itself."""
        return self.fused is not None

    @property
    def counts_changes(self) -> bool:
        """Whether it also counts the tokens whose experts changed."""
        return self.fused is not None and self.fused.config.top_k > 0

    def nearest(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The K nearest cases, nearest first: d² of prepared vectors, in the layer's γ where its
        domains have their own, and rows of the memory; if cases are drawn, the rows of those.

        Shapes: inputs [T, d] → [T, K] fp32, [T, K] int64.
        """
        squared_distance, places = self._recalled(inputs)
        return squared_distance, rows_of(self.index, places)

    def nearest_of(self, inputs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The same for another K, none of them drawn. Shapes: inputs [T, d] → [T, k] twice."""
        squared_distance, places = self._found(self._queries(inputs), min(k, self.cases))
        return squared_distance, rows_of(self.index, places)

    def log_similarity(self, squared_distance: Tensor) -> Tensor:
        """log s of each neighbour, as it is weighed. Shapes: [T, K] → [T, K], at most 0."""
        return self.similarity.log(squared_distance, self.gamma)

    def confidence(self, squared_distance: Tensor) -> Tensor:
        """λ of each token. Shapes: [T, K] → [T], in [0, 1]."""
        log_similarity = self.similarity.log(squared_distance, self.confidence_gamma)
        return self.confidence_factor * confidence(log_similarity)

    def _recalled(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """d² of the K nearest cases, and the places of those recalled: theirs, if none are drawn.

        Shapes: inputs [T, d] → [T, K] fp32, [T, K] int64.
        """
        queries = self._queries(inputs)
        squared_distance, places = self._found(queries, self.k)
        if self.drawn is not None:
            places = draw_cases(queries, self.k, self.cases, self.drawn)
        return squared_distance, places

    def _found(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """d² of the k nearest in the layer's γ, and their places. Shapes: [T, d] → [T, k] twice."""
        squared_distance, places = self.index.search(queries, k)
        if self.ratio is None:
            return squared_distance, places
        squared_distance, order = (squared_distance * self.ratio[places]).sort(dim=-1)
        return squared_distance, places.gather(1, order)

    def _queries(self, inputs: Tensor) -> Tensor:
        return self.similarity.prepare(inputs.to(self.dtype))

    def _values(self, places: Tensor) -> Tensor:
        tensors = [self.get_buffer(name) for name in self.value_names]
        return tensors[0][places] if len(tensors) == 1 else PackedValues(*tensors).at(places)


@dataclass(frozen=True)
class RouterCall:
    """What one router call was about. Shapes: inputs [T, d]; logits, the router's own, and mixed
    [T, N]; before, after [T, top_k], the experts of either, ascending; confidence [T]."""

    layer: int
    recall: LayerRecall
    inputs: Tensor
    logits: Tensor
    mixed: Tensor
    before: Tensor
    after: Tensor
    confidence: Tensor


def open_layer(
    layer: Layer, config: RoutingConfig, device: torch.device
) -> tuple[KeyIndex, Tensor | PackedValues]:
    """The index of a layer and its values, in the index's order, on `device`."""
    if isinstance(layer, CompressedLayer):
        index = load_index(layer.part("index"), _index_of(layer, config), device)
        kept = {name: tensor.to(device) for name, tensor in layer.part("values").items()}
        return index, kept["values"] if "values" in kept else PackedValues(**kept)
    settings = config.index or IndexConfig()
    keys = SIMILARITIES[config.similarity].prepare(layer.keys)
    index = build_index(keys, settings, device)
    values = layer.values.to(device)
    if settings.kind != "fast":
        return index, values
    rows = rows_of(index, torch.arange(len(values), device=device))
    return index, PackedValues.of(values[rows], settings.value_bits)


def rows_of(index: KeyIndex, places: Tensor) -> Tensor:
    """Rows of the memory. Shapes: places [...] → [...] int64."""
    return index.rows[places].long() if isinstance(index, FastIndex) else places


def layer_widths(gamma: float, index: int, config: RoutingConfig) -> Widths:
    """What the config makes of a layer's γ; its own γ, if it has one, comes before the layer's."""
    own, largest = config.for_layer(index), torch.finfo(torch.float32).max
    if not SIMILARITIES[config.similarity].uses_gamma:
        return Widths(1.0, 1.0, own.confidence_factor)
    gamma = config.gamma or gamma
    return Widths(
        min(gamma * own.gamma_scale, largest),
        min(gamma * own.confidence_scale, largest),
        own.confidence_factor,
    )


def layer_gammas(
    memory: RoutingMemory, index: int, config: RoutingConfig, device: torch.device
) -> Gammas:
    """The layer's γ: as configured, one for all; as stored for the RBF kernel, or from prepared
    keys, with those of its domains."""
    similarity = SIMILARITIES[config.similarity]
    layer = memory.layers[index]
    if not similarity.uses_gamma:
        return Gammas(1.0)
    if config.gamma is not None:
        return Gammas(config.gamma)
    if config.similarity == "rbf" or isinstance(layer, CompressedLayer):
        return Gammas(layer.gamma, layer.gammas)
    keys, where = similarity.prepare(layer.keys), memory.provenance
    example, case = where.example, where.prefix_hash()
    joint = estimate_gamma(keys, example, case, device)
    sizes = where.cases_of_domain
    return Gammas(joint, estimate_by_domain(keys, example, case, sizes, device, joint))


def _index_of(layer: CompressedLayer, config: RoutingConfig) -> IndexConfig:
    """The compressed layer's own index, with the probes asked for; refuses what it is not."""
    asked, own = config.index, layer.index
    prepared = SIMILARITIES[layer.similarity].prepare
    if SIMILARITIES[config.similarity].prepare is not prepared:
        raise ConfigError(
            f"This memory was compressed for {layer.similarity!r} similarity and cannot serve "
            f"{config.similarity!r}. Compress the full memory again, for that."
        )
    if asked is None:
        return own
    if asked.kind != own.kind or (asked.rerank and not own.rerank):
        wanted = f"{asked.kind}{' with its keys, to rank again' if asked.rerank else ''}"
        raise ConfigError(
            f"This memory was compressed as {own.kind!r}, and {wanted!r} was asked for. "
            f"Leave the index out, or compress the full memory again."
        )
    usual = IndexConfig(kind=own.kind)
    for name in ("dims", "bits", "value_bits"):
        wanted, has = getattr(asked, name), getattr(own, name)
        if wanted not in (has, getattr(usual, name)):
            raise ConfigError(
                f"This memory was compressed with {name}={has}, and {name}={wanted} was asked for. "
                f"Leave it out, or compress the full memory again."
            )
    return asked


def named_values(values: Tensor | PackedValues) -> dict[str, Tensor]:
    return values._asdict() if isinstance(values, PackedValues) else {"values": values}
