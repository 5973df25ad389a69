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

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from knn_moe.config import ENTROPY, RoutingConfig
from knn_moe.errors import ConfigError, UnsupportedModelError
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.memory import Layer
from knn_moe.routers.find import Router

_SAMPLE: Final = 4096  # cases whose entropy is measured: all, or this many evenly spaced
_ROWS: Final = 4096  # keys a router reads at a time
_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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
    measured = entropy(own_logits(router, keys.to(router.device)))
    return float(measured.sort().values[below - 1])


def own_logits(router: Router, keys: Tensor) -> Tensor:
    """The logits a router's linear map gives. Shapes: keys [n, d], what it reads → [n, N]."""
    if router.scope is not router.module:  # its block applies the weight, and never calls it
        bias = getattr(router.module, "bias", None)
        return F.linear(keys.to(router.weight.dtype), router.weight, bias)
    mode = _Through(keys)
    nothing = torch.zeros(1, 1, router.hidden_size, device=router.device).to(router.weight.dtype)
    wanted = inspect.signature(router.module.forward).parameters.values()
    # What else some take, such as a bias on the choice of experts, comes after the linear map.
    more = [None for each in wanted if each.default is each.empty and each.kind in _BY_PLACE][1:]
    with mode, suppress(_Seen):
        router.module.forward(nothing, *more)
    if mode.logits is None:
        raise UnsupportedModelError(
            f"Router {router.name!r} computed its logits without torch.nn.functional.linear, so "
            f"what it gives a key cannot be told: leave out gate='entropy', take another control "
            f"than 'own-logits', or calibrate with --keep-values."
        )
    return mode.logits


@torch.no_grad()
def own_logits_of_all(router: Router, keys: Tensor) -> Tensor:
    """The same for as many keys as there are, wherever they lie: some thousand at a time go to the
    router, which may make copies of them. Shapes: keys [M, d] → [M, N] fp32, where the keys are."""
    parts = (own_logits(router, part.to(router.device)) for part in keys.split(_ROWS))
    return torch.cat([part.float().to(keys.device) for part in parts])


class _Seen(Exception):  # noqa: N818  # no failure: it ends a forward of which enough is seen
    pass


class _Through(TorchFunctionMode):
    """While active, send keys through the first linear map instead of what it is given, and stop:
    they are what it reads, and something may come before it, such as a norm."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.logits: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear:
            return func(*args, **kwargs)
        self.logits = func(self.keys.to(args[0].dtype), *args[1:], **kwargs)
        raise _Seen
