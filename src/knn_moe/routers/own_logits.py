"""Compute the logits that a router gives stored keys, without running the model.

Knows where in a router's forward the keys of a memory enter: at its linear map.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from knn_moe.errors import UnsupportedModelError
from knn_moe.routers.find import Router
from knn_moe.routers.intercept import Watch

_ROWS: Final = 4096  # keys that a router reads at a time
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@torch.no_grad()
def compute_own_logits(router: Router, keys: Tensor) -> Tensor:
    """Return the logits of the router's linear map for `keys`.

    Args:
        router: The router; keys go to its device in parts.
        keys: Inputs of its linear map, as a memory stores them. Shape [M, d].

    Returns:
        Logits [M, N] in fp32, on the device of `keys`.

    Raises:
        UnsupportedModelError: The router does not use torch.nn.functional.linear.
    """
    parts = (_compute_part(router, part.to(router.device)) for part in keys.split(_ROWS))
    return torch.cat([part.float().to(keys.device) for part in parts])


def _compute_part(router: Router, keys: Tensor) -> Tensor:
    if router.scope is not router.module:  # its block applies the weight, and never calls it
        bias = getattr(router.module, "bias", None)
        return F.linear(keys.to(router.weight.dtype), router.weight, bias)
    watch = _SubstituteInputs(router, keys)
    placeholder = torch.zeros(1, 1, router.hidden_size, device=router.device)
    parameters = inspect.signature(router.module.forward).parameters.values()
    # Some routers take more, such as a bias on the choice of experts: it acts after the linear map.
    required = [each for each in parameters if each.default is each.empty]
    more = [None for each in required if each.kind in _POSITIONAL][1:]
    (watched,), _ = watch.over((placeholder.to(router.weight.dtype),), {})
    with suppress(_LogitsComputed):
        router.module.forward(watched, *more)
    if watch.logits is None:
        raise UnsupportedModelError(
            f"Router {router.name!r} computes its logits without torch.nn.functional.linear, so "
            f"its own logits for stored keys cannot be computed. Choose another control "
            f"than 'own-logits', or calibrate with --keep-values."
        )
    return watch.logits


class _LogitsComputed(Exception):  # noqa: N818  # no failure: it ends a forward that is not needed
    pass


class _SubstituteInputs(Watch):
    """Applies the first linear map to `keys` instead of its input, and ends the forward there.

    Keys are inputs of the linear map, not of the router: a norm may come before it.
    """

    def __init__(self, router: Router, keys: Tensor) -> None:
        super().__init__(router, lambda inputs, logits: logits)
        self.keys = keys

    def run(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        if func is not F.linear:
            return super().run(func, args, kwargs)
        self.logits = func(self.keys.to(args[0].dtype), *args[1:], **kwargs)
        raise _LogitsComputed
