"""A gate on recall: tokens it turns away are left to the router alone, with λ = 0.

The paper's Selective variant (§6.1) leaves the questions a model finds easy to the model alone, for
one more pass over each. These gates choose token by token, from what the router has at hand:

- "entropy": the router is sure. The entropy of its own choice, softmax of its own logits, is among
  the lowest `gate_share` of those of the memory's own cases in that layer.
- "confidence": the memory is not. λ is at most `gate_share` itself: a plain threshold, no measured
  share.

Tensors in, tensors out, static shapes, as recall.py.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.config import ENTROPY, RoutingConfig
from knn_moe.errors import ConfigError
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.memory import Layer
from knn_moe.routers.find import Router
from knn_moe.routers.own_logits import compute_own_logits

_SAMPLE: Final = 4096  # cases whose entropy is measured: all, or this many evenly spaced


class Gate(nn.Module):
    """The gate of one layer. A module only so that its threshold is a buffer, as LayerRecall."""

    threshold: Tensor

    def __init__(self, kind: str, threshold: float, device: torch.device) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("threshold", torch.tensor(threshold, device=device), persistent=False)

    def forward(self, logits: Tensor, mixed: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
        """The logits to use and λ, after the gate: what is not turned away is as it was.

        Shapes: logits, the router's own, and mixed [T, N]; confidence [T] → [T, N], [T].
        """
        measured = entropy(logits) if self.kind == ENTROPY else confidence
        alone = measured <= self.threshold
        return torch.where(alone[:, None], logits, mixed), confidence.masked_fill(alone, 0.0)


def open_gate(router: Router, layer: Layer, config: RoutingConfig) -> Gate | None:
    """The gate of a layer, on its router's device; None if the config asks for none."""
    if config.gate is None:
        return None
    threshold = config.gate_share
    if config.gate == ENTROPY:
        threshold = entropy_threshold(router, layer, config.gate_share)
    return Gate(config.gate, threshold, router.device)


def entropy(logits: Tensor) -> Tensor:
    """Of the softmax, in nats. Shapes: [T, N] → [T] fp32."""
    parts: Tensor = torch.special.entr(logits.float().softmax(dim=-1))
    return parts.sum(dim=-1)


@torch.no_grad()
def entropy_threshold(router: Router, layer: Layer, share: float) -> float:
    """The entropy that `share` of the layer's cases do not exceed: -inf for none, inf for all."""
    if isinstance(layer, CompressedLayer):
        raise ConfigError(
            "gate='entropy' measures a memory's keys, and a compressed memory has none. Attach the "
            "full memory, or use gate='confidence'."
        )
    count = min(_SAMPLE, len(layer))
    below = round(share * count)
    if share == 1 or below == 0:
        return float("inf") if share == 1 else float("-inf")
    keys = layer.keys[torch.arange(count) * len(layer) // count]
    measured = entropy(compute_own_logits(router, keys.to(router.device)))
    return float(measured.sort().values[below - 1])
