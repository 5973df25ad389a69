"""Distilled memories in places that stay where they are, for CUDA graphs.

A recorded graph reads the same addresses in every pass. So each layer has room for some distilled
memories, each token has the number of its memory in a buffer, and one call answers all tokens.
Memories come and go by being copied in. Knows tensors; nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from knn_moe.equations.prototypes import prototype_confidence, prototype_update
from knn_moe.equations.similarity import rbf
from knn_moe.index.exact import dot_products, squared_distance
from knn_moe.recall.distilled import DistilledRecall
from knn_moe.recall.fused_prototypes import FusedPrototypes, kernels_usable
from knn_moe.recall.prototype_tensors import PrototypeTensors
from knn_moe.routers.find import Router
from torch import Tensor

from knn_moe_vllm.placed import Placed

_ALIGNED: Final = 8  # prototypes: each memory's part begins at an aligned address


class LayerSlots:
    """Room for S distilled memories of one layer.

    Args:
        router: The layer's router.
        count: S.
        prototypes: P, of a memory at the most.
        dtype: Of the prototypes' keys.
    """

    def __init__(self, router: Router, count: int, prototypes: int, dtype: torch.dtype) -> None:
        device, width, experts = router.device, router.hidden_size, router.num_experts
        rows = prototypes + -prototypes % _ALIGNED
        self.tensors = PrototypeTensors(
            factors=torch.zeros(count, experts + rows, width, dtype=dtype, device=device),
            centre=torch.zeros(count, width, device=device),
            offsets=torch.zeros(count, rows, device=device),
            updates=torch.zeros(count, rows, experts, device=device),
            sizes=torch.zeros(count, dtype=torch.int32, device=device),
            widths=torch.zeros(count, 4, device=device),
        )
        self.counts = torch.zeros(count, 4, dtype=torch.int64, device=device)
        self.calls = torch.zeros(count, dtype=torch.int64, device=device)
        kernels = kernels_usable(device)
        self.fused = FusedPrototypes(self.tensors, 0) if kernels else None

    def put(self, slot: int, recall: DistilledRecall) -> None:
        """Copy a memory into its place."""
        size = len(recall.offsets)
        experts = self.tensors.experts
        self.tensors.factors[slot, : experts + size] = recall.factors
        self.tensors.centre[slot] = recall.centre
        self.tensors.offsets[slot, :size] = recall.offsets
        self.tensors.updates[slot, :size] = recall.updates
        widths = recall.gamma, recall.log_threshold, recall.confidence_factor
        self.tensors.widths[slot, :3] = torch.stack([each.float() for each in widths])
        self.tensors.sizes[slot] = size

    def clear(self, slot: int) -> None:
        """Leave the tokens of a place to the router: this layer has no part in their memory."""
        self.tensors.widths[slot] = 0.0  # λ's factor among them

    def mix(self, inputs: Tensor, logits: Tensor, slots: Tensor) -> Tensor:
        """Return the mixed logits; a slot of -1 keeps them.

        Shapes: inputs [T, d]; logits [T, N]; slots [T] int32.
        """
        if self.fused is not None:
            mixed, _ = self.fused.forward(
                inputs, logits, self.counts, None, slots=slots, calls=self.calls
            )
            return mixed
        mixed = logits
        for slot in range(len(self.tensors.sizes)):
            if int(self.tensors.sizes[slot]):
                own = _mix_one(self.tensors.of_memory(slot), inputs, logits)
                mixed = torch.where((slots == slot)[:, None], own, mixed)
        return mixed


def _mix_one(tensors: PrototypeTensors, inputs: Tensor, logits: Tensor) -> Tensor:
    """Return the logits that one memory mixes, as DistilledRecall does. Shapes: S = 1."""
    factors, experts = tensors.factors[0], tensors.experts
    gamma, log_threshold, factor, _ = tensors.widths[0]
    inputs = inputs.to(factors.dtype)
    products = dot_products(inputs, factors)
    linear, products = products[:, :experts], products[:, experts:]
    distance = squared_distance(inputs, tensors.centre[0])[:, None] + tensors.offsets[0]
    log_similarity = rbf((distance - 2 * products).clamp(min=0), gamma)
    update = prototype_update(log_similarity, tensors.updates[0], linear)
    confidence = factor * prototype_confidence(log_similarity, log_threshold)
    mixed: Tensor = logits.float() + confidence[:, None] * update
    return mixed.to(logits.dtype)


class Slots:
    """Room for the memories of one pass, in all layers of this process.

    Args:
        routers: The routers of this process.
        count: Memories that one pass may use.
        prototypes: Of a memory's layer, at the most.
        tokens: Of one pass, at the most.
        dtype: The model's.
    """

    def __init__(
        self, routers: list[Router], count: int, prototypes: int, tokens: int, dtype: torch.dtype
    ) -> None:
        self.prototypes = prototypes
        self.layers = {
            router.layer: LayerSlots(router, count, prototypes, dtype) for router in routers
        }
        device = routers[0].device
        self.owners = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self.spares = torch.zeros(count + 1, dtype=torch.bool, device=device)  # the last: nobody's
        self.held: list[Placed | None] = [None] * count

    def assign(self, numbers: Tensor, memories: Mapping[int, Placed]) -> None:
        """Copy in what the next pass uses, and note whose each of its tokens is.

        Shapes: numbers [T], the keys of `memories`, or others for tokens that use none.
        """
        used = [number for number in numbers.unique().tolist() if number in memories]
        owners = torch.full_like(numbers, -1, dtype=torch.int32)
        kept = [memories[number] for number in used]
        for number, placed in zip(used, kept, strict=True):
            if not any(placed is each for each in self.held):
                self._put(self._free_slot(kept), placed)
            slot = next(place for place, each in enumerate(self.held) if each is placed)
            owners[numbers == number] = slot
        self.owners.fill_(-1)
        self.owners[: len(owners)] = owners.to(self.owners.device)

    def _free_slot(self, kept: list[Placed]) -> int:
        return next(
            slot
            for slot, held in enumerate(self.held)
            if held is None or not any(held is each for each in kept)
        )

    def _put(self, slot: int, placed: Placed) -> None:
        for layer, slots in self.layers.items():
            recall = placed.recalls.get(layer)
            if isinstance(recall, DistilledRecall):
                slots.put(slot, recall)
            else:
                slots.clear(slot)
        self.spares[slot] = placed.spares_first
        self.held[slot] = placed

    def mix(self, layer: int, x: Tensor, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of a layer, each token's mixed by its own memory.

        Shapes: x [T, d]; logits [T, N]; positions [T].
        """
        owners = self.owners[: len(x)]
        spared = self.spares[owners.long()] & (positions == 0)
        return self.layers[layer].mix(x, logits, owners.masked_fill(spared, -1))
