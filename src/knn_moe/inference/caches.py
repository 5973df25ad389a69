"""The cache that a model is called with: find it, and ask it for its length.

Continuous batching has no such cache: it calls a model with one flat row of several sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


def find_cache(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any = None
) -> Cache | None:
    """Return the cache the model was given, or else the one it made and returned."""
    returned = output.values() if isinstance(output, Mapping) else ()
    returned = output if isinstance(output, tuple) else returned
    for value in (*args, *kwargs.values(), *returned):
        if isinstance(value, Cache):
            return value
    return None


def cache_length(cache: Cache) -> int | Tensor | None:
    """Return how many tokens a cache holds; None if it does not know.

    Static caches count on the device, in a tensor.
    """
    try:
        length: int | Tensor = cache.get_seq_length()
        if isinstance(length, int) and length == 0 and cache.layers:
            # MiniMax's asks its first layer, whose attention is linear and counts nothing.
            counting = (layer for layer in cache.layers if isinstance(layer, CacheLayerMixin))
            return max(int(layer.get_seq_length()) for layer in counting)
    except (ValueError, NotImplementedError, AttributeError):  # a cache without attention
        return None
    return length


def flat_length(kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return how many tokens the sequences of a flat batch have, [] on its device; None if the
    batch is not flat."""
    ends = kwargs.get("cu_seq_lens_q")
    return ends[-1] if isinstance(ends, Tensor) and len(ends) else None
