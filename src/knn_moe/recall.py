"""One layer's memory at work: search, similarity, proposal, confidence, mixing (§4.2).

Tensors in, tensors out, static shapes: runs eagerly, under torch.compile and in CUDA graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knn_moe.config import RoutingConfig
from knn_moe.gamma import estimate_gamma
from knn_moe.index import ExactIndex, KeyIndex
from knn_moe.memory import LayerMemory, RoutingMemory
from knn_moe.mixing import confidence, mix_logits, propose_logits
from knn_moe.similarity import SIMILARITIES


class LayerRecall(nn.Module):
    """Keys, values and kernel of one layer, on the router's device.

    A module only so that its tensors are buffers, which compilers treat as static; it is no part
    of the model.
    """

    values: Tensor
    gamma: Tensor

    def __init__(
        self, layer: LayerMemory, gamma: float, config: RoutingConfig, device: torch.device
    ) -> None:
        super().__init__()
        self.similarity = SIMILARITIES[config.similarity]
        self.k = min(config.k, len(layer.keys))
        self.dtype = layer.keys.dtype
        self.index: KeyIndex = ExactIndex(self.similarity.prepare(layer.keys).to(device))
        self.register_buffer("values", layer.values.to(device), persistent=False)
        self.register_buffer("gamma", torch.tensor(gamma, device=device), persistent=False)

    def forward(self, inputs: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Mixed logits and confidence. Shapes: inputs [T, d]; logits [T, N] → [T, N], [T]."""
        squared_distance, rows = self.nearest(inputs)
        log_similarity = self.log_similarity(squared_distance)
        proposal = propose_logits(self.values[rows], log_similarity)
        weight = confidence(log_similarity)
        return mix_logits(logits.float(), proposal, weight), weight

    def nearest(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The K nearest cases, nearest first: d² of prepared vectors, and rows of the memory.

        Shapes: inputs [T, d] → [T, K] fp32, [T, K] int64.
        """
        queries = self.similarity.prepare(inputs.to(self.dtype))
        return self.index.search(queries, self.k)

    def log_similarity(self, squared_distance: Tensor) -> Tensor:
        """log s of each neighbour. Shapes: [T, K] → [T, K], at most 0."""
        return self.similarity.log(squared_distance, self.gamma)


def layer_gamma(
    memory: RoutingMemory, index: int, config: RoutingConfig, device: torch.device
) -> float:
    """The layer's γ: as configured, as stored for the RBF kernel, or from prepared keys."""
    similarity = SIMILARITIES[config.similarity]
    layer = memory.layers[index]
    if not similarity.uses_gamma:
        return 1.0
    if config.gamma is not None:
        gamma = config.gamma
    elif config.similarity == "rbf":
        gamma = layer.gamma
    else:
        keys = similarity.prepare(layer.keys)
        example, case = memory.provenance.example, memory.provenance.prefix_hash()
        gamma = estimate_gamma(keys, example, case, device)
    return min(gamma * config.gamma_scale, torch.finfo(torch.float32).max)
