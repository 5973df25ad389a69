"""A gate on recall: the tokens it excludes are left to the router alone, with λ = 0.

The paper's Selective variant (§6.1) leaves the questions a model finds easy to the model alone, at
the cost of one more pass over each. These gates choose token by token:

- "entropy" excludes tokens that the router is sure of: the entropy of its softmax is among the
  lowest `gate_share` of the memory's own cases in that layer.
- "confidence" excludes tokens that the memory is not sure of: λ is at most `gate_share`.

Tensors in, tensors out, static shapes, as in recall/.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.config import ENTROPY, RoutingConfig
from knn_moe.errors import ConfigError
from knn_moe.index.exact import spread_evenly
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.memory import Layer
from knn_moe.routers.find import Router
from knn_moe.routers.own_logits import compute_own_logits

_SAMPLE: Final = 4096  # cases whose entropy is measured: all, or this many evenly spaced


class Gate(nn.Module):
    """The gate of one layer. A module only so that its threshold is a buffer, as in LayerRecall."""

    threshold: Tensor

    def __init__(self, kind: str, threshold: float, device: torch.device) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("threshold", torch.tensor(threshold, device=device), persistent=False)

    def forward(self, logits: Tensor, mixed: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits to use and λ; tokens that are not excluded keep theirs.

        Shapes: logits, the router's own, and mixed [T, N]; confidence [T] → [T, N], [T].
        """
        measured = entropy(logits) if self.kind == ENTROPY else confidence
        excluded = measured <= self.threshold
        return torch.where(excluded[:, None], logits, mixed), confidence.masked_fill(excluded, 0.0)


def make_gate(router: Router, layer: Layer, config: RoutingConfig) -> Gate | None:
    """Make the gate of a layer, on its router's device; None if the config has none."""
    if config.gate is None:
        return None
    threshold = config.gate_share
    if config.gate == ENTROPY:
        threshold = entropy_threshold(router, layer, config.gate_share)
    return Gate(config.gate, threshold, router.device)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the softmax in nats. Shapes: [T, N] → [T] fp32."""
    parts: Tensor = torch.special.entr(logits.float().softmax(dim=-1))
    return parts.sum(dim=-1)


@torch.no_grad()
def entropy_threshold(router: Router, layer: Layer, share: float) -> float:
    """Return the entropy that `share` of the layer's cases do not exceed, -inf for 0, inf for 1.

    Raises:
        ConfigError: The layer is compressed and has no keys to measure.
    """
    if isinstance(layer, CompressedLayer):
        raise ConfigError(
            "gate='entropy' needs the memory's keys, and a compressed memory has none. Attach the "
            "full memory, or use gate='confidence'."
        )
    count = min(_SAMPLE, len(layer))
    below = round(share * count)
    if share == 1 or below == 0:
        return float("inf") if share == 1 else float("-inf")
    keys = layer.keys[spread_evenly(count, len(layer))]
    measured = entropy(compute_own_logits(router, keys.to(router.device)))
    return float(measured.sort().values[below - 1])
