"""One layer's distilled memory on a router's device (equations/prototypes.py).

Every prototype is recalled, so nothing is searched: one product with the linear update and the
keys, a softmax, and one product with the prototypes' updates. Plain torch with static shapes, which
compiles. On a GPU kernels do all of it in two launches (fused_prototypes.py), unless gradients are
to flow through it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.config import RoutingConfig
from knn_moe.equations.prototypes import prototype_confidence, prototype_update
from knn_moe.equations.similarity import rbf
from knn_moe.errors import ConfigError, MemoryMismatchError
from knn_moe.index.exact import centred_norms, dot_products, squared_distance
from knn_moe.index.fast.fused import MOST_RANKED
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.validate import check_layer_contents
from knn_moe.recall.fused_prototypes import FusedPrototypes, kernels_usable
from knn_moe.recall.neighbours import Neighbours
from knn_moe.recall.prototype_tensors import PrototypeTensors

_WHERE: Final = "A layer of this memory"
_TOKENS: Final = 1 << 13  # that are compared with all prototypes at a time


class DistilledRecall(nn.Module):
    """Prototypes of one layer, on the router's device.

    A module only so that its tensors are buffers, which compilers treat as static; it is no part
    of the model.

    Args:
        layer: The prototypes.
        config: How the memory is used: see `check_use`. Its K is how many prototypes are shown
            when a token is explained.
        confidence_factor: Multiplies λ.
        device: Where the router runs.
        count_top: Count changes among this many top logits, where kernels can.
    """

    factors: Tensor
    centre: Tensor
    offsets: Tensor
    updates: Tensor
    gamma: Tensor
    log_threshold: Tensor
    confidence_factor: Tensor
    cases: Tensor
    uncounted: Tensor

    def __init__(
        self,
        layer: DistilledLayer,
        config: RoutingConfig,
        confidence_factor: float,
        device: torch.device,
        *,
        count_top: int = 0,
    ) -> None:
        super().__init__()
        check_use(config)
        check_layer_contents(layer, _WHERE)
        self.k = min(config.k, len(layer))
        self.dtype = layer.shape.dtype
        keys = layer.keys.to(device)
        centre, norms = centred_norms(keys)
        # ‖x - k‖² = ‖x - c‖² + ‖k - c‖² + 2 c·(k - c) - 2 x·(k - c). Around their centre c keys are
        # small, and less is lost in the difference.
        around_zero = (keys.float() - centre).to(self.dtype)
        offsets = norms + 2 * around_zero.float() @ centre
        numbers = {
            "gamma": layer.gamma,
            "log_threshold": layer.log_threshold,
            "confidence_factor": confidence_factor,
        }
        buffers = {
            "factors": torch.cat([layer.linear.to(device), around_zero]),
            "centre": centre,
            "offsets": offsets,
            "updates": layer.updates.to(device).contiguous(),
            "cases": layer.cases.to(device),
            "uncounted": torch.zeros(4, dtype=torch.int64, device=device),
            **{
                name: torch.tensor(value, dtype=torch.float32, device=device)
                for name, value in numbers.items()
            },
        }
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)
        self.fused: FusedPrototypes | None = None
        if kernels_usable(device):
            top = count_top if layer.shape.num_experts <= MOST_RANKED else 0
            self.fused = FusedPrototypes(self.tensors(), top)

    def tensors(self) -> PrototypeTensors:
        """Return the tensors as they are stacked; they share their data with the buffers."""
        size = torch.tensor([len(self.offsets)], dtype=torch.int32, device=self.offsets.device)
        widths = [self.gamma, self.log_threshold, self.confidence_factor]
        return PrototypeTensors(
            factors=self.factors[None],
            centre=self.centre[None],
            offsets=self.offsets[None],
            updates=self.updates[None],
            sizes=size,
            widths=torch.stack([*widths, torch.zeros_like(self.gamma)])[None].float(),
        )

    def share(self, tensors: PrototypeTensors) -> None:
        """Use tensors that are equal to this layer's own, as part of a stack of several memories'.

        Shapes: S = 1.
        """
        for name in ("factors", "centre", "offsets", "updates"):
            setattr(self, name, getattr(tensors, name)[0])
        if self.fused is not None:
            self.fused = FusedPrototypes(tensors, self.fused.top)

    def check_values_fit(self, dtype: torch.dtype) -> None:
        """Raise MemoryMismatchError if updates may be beyond the router's own `dtype`."""
        experts = self.updates.shape[1]
        linear, keys = (
            part.float().norm(dim=-1).amax()
            for part in (self.factors[:experts], self.factors[experts:])
        )
        # Of inputs as far from zero as the prototypes are.
        largest = float(self.updates.abs().amax() + linear * (keys + self.centre.norm()))
        if dtype == torch.float16 and largest > torch.finfo(dtype).max:
            raise MemoryMismatchError(
                f"The memory has updates up to {largest:g}, which float16 cannot hold. Load the "
                f"model in bfloat16 or float32."
            )

    def forward(
        self,
        inputs: Tensor,
        logits: Tensor,
        counts: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the updated logits and λ. Kernels, where they are used, add the call to `counts`.

        Shapes: inputs [T, d]; logits [T, N]; counts [4], see inference/hooks.py; real [T] bool,
        None: all are. Result [T, N] in the logits' dtype, [T] fp32.
        """
        if self.fused is not None and self.counts_call(inputs, logits):
            counted = self.uncounted if counts is None else counts
            return self.fused.forward(inputs, logits, counted, real)
        parts = [self._recall(part) for part in inputs.split(_TOKENS)]
        update, confidence = (
            parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        )
        mixed = logits.float() + confidence[:, None] * update
        return mixed.to(logits.dtype), confidence

    def counts_call(self, inputs: Tensor, logits: Tensor) -> bool:
        """Return whether `forward` counts this call itself: calls, tokens and confidence."""
        differentiable = inputs.requires_grad or logits.requires_grad
        return self.fused is not None and not (differentiable and torch.is_grad_enabled())

    @property
    def counts_changes(self) -> bool:
        """Whether it also counts the tokens whose experts changed."""
        return self.fused is not None and self.fused.top > 0

    def recall_weighed(self, inputs: Tensor) -> tuple[Neighbours, Tensor]:
        """Return the K most similar prototypes, as the memory's cases that are nearest to them, and
        the share that each has of the update. Shapes: inputs [T, d]; weights [T, K]."""
        log_similarity, _ = self._compare(inputs)
        found = torch.topk(log_similarity, self.k, dim=-1)
        weight = torch.softmax(log_similarity, dim=-1).gather(1, found.indices)
        distance = (-found.values / self.gamma).clamp(min=0)
        return Neighbours(distance, self.cases[found.indices]), weight

    def _recall(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the update and λ. Shapes: inputs [T, d] → [T, N], [T]."""
        log_similarity, linear = self._compare(inputs)
        update = prototype_update(log_similarity, self.updates, linear)
        confidence = prototype_confidence(log_similarity, self.log_threshold)
        return update, self.confidence_factor * confidence

    def _compare(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log s of every prototype, and W x. Shapes: [T, d] → [T, P], [T, N], in fp32."""
        inputs = inputs.to(self.dtype)
        products = dot_products(inputs, self.factors)
        experts = self.updates.shape[1]
        linear, products = products[:, :experts], products[:, experts:]
        distance = squared_distance(inputs, self.centre)[:, None] + self.offsets - 2 * products
        return rbf(distance.clamp(min=0), self.gamma), linear


def check_use(config: RoutingConfig) -> None:
    """Raise ConfigError if `config` asks for what a distilled memory does not have."""
    usual = RoutingConfig()
    names = ("similarity", "gamma", "gamma_scale", "confidence_scale", "index")
    asked = [(name, getattr(config, name), getattr(usual, name)) for name in names]
    for layer in config.per_layer:
        asked += [(name, getattr(layer, name), 1.0) for name in ("gamma_scale", "confidence_scale")]
    for name, value, expected in asked:
        if value != expected:
            raise ConfigError(
                f"A distilled memory has its own widths and searches nothing, so {name}={value} "
                f"has no effect on it. Leave it out, or use the memory that it was distilled from."
            )
    if config.head is not None:
        raise ConfigError(
            "A distilled memory has no language-model head. Leave head out, or use the memory that "
            "it was distilled from."
        )
