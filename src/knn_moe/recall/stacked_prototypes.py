"""Distilled layers of several memories in plain torch, each token by its own memory.

Tokens are sorted by their memories. Only the two products are made memory by memory; everything
else is done once for all tokens. Where there are kernels, they do all of it
(fused_prototypes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from knn_moe.equations.prototypes import prototype_confidence
from knn_moe.equations.similarity import rbf
from knn_moe.index.exact import dot_products, squared_distance
from knn_moe.recall.prototype_tensors import PrototypeTensors


class StackedPrototypes(nn.Module):
    """Prototypes of several memories for one router.

    A module, so that compilers treat its tensors as static.
    """

    beyond: Tensor

    def __init__(self, tensors: PrototypeTensors) -> None:
        super().__init__()
        for name, tensor in tensors._asdict().items():
            self.register_buffer(name, tensor, persistent=False)
        places = torch.arange(tensors.prototypes, device=tensors.sizes.device)
        self.register_buffer("beyond", places >= tensors.sizes[:, None], persistent=False)
        self.padded = bool(self.beyond.any())

    @property
    def tensors(self) -> PrototypeTensors:
        """The tensors."""
        return PrototypeTensors(*(getattr(self, name) for name in PrototypeTensors._fields))

    def forward(self, inputs: Tensor, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed logits and λ. A token without a memory keeps its logits, and its λ is 0.

        Shapes: inputs [T, d]; logits [T, N]; slots [T] int32, -1: no memory. Result [T, N] in the
        logits' dtype, [T] fp32.
        """
        held = self.tensors
        counts = torch.bincount(slots + 1, minlength=len(held.sizes) + 1).tolist()
        chosen = torch.argsort(slots, stable=True)[counts[0] :]
        mixed, confidence = logits.clone(), logits.new_zeros(len(logits), dtype=torch.float32)
        if not len(chosen):
            return mixed, confidence
        own = slots[chosen].long()
        x = inputs[chosen].to(held.factors.dtype)
        products = _by_memory(
            counts[1:], lambda slot, part: dot_products(x[part], held.factors[slot])
        )
        linear, near = products[:, : held.experts], products[:, held.experts :]
        gamma, threshold, factor, _ = held.widths[own].unbind(dim=1)
        distance = squared_distance(x, held.centre[own])[:, None] + held.offsets[own] - 2 * near
        log_similarity = rbf(distance.clamp(min=0), gamma[:, None])
        if self.padded:
            log_similarity = log_similarity.masked_fill(self.beyond[own], float("-inf"))
        shares = torch.softmax(log_similarity, dim=-1)
        update = linear + _by_memory(
            counts[1:], lambda slot, part: shares[part] @ held.updates[slot]
        )
        certain = factor * prototype_confidence(log_similarity, threshold)
        moved = logits[chosen].float() + certain[:, None] * update
        return (
            mixed.index_copy_(0, chosen, moved.to(logits.dtype)),
            confidence.index_copy_(0, chosen, certain),
        )


def _by_memory(counts: Sequence[int], make: Callable[[int, slice], Tensor]) -> Tensor:
    """Return what `make` gives for the tokens of each memory, one below the other.

    Args:
        counts: The number of tokens of each memory.
        make: Takes a memory and its part of the sorted tokens.
    """
    parts, start = [], 0
    for slot, count in enumerate(counts):
        if count:
            parts.append(make(slot, slice(start, start + count)))
        start += count
    return torch.cat(parts)
