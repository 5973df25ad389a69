"""What the model read last: the token ids of its last sequences, prompt and decoded tokens alike.

A hook on the decoder stack copies the ids of each call and the length of the cache. No value is
looked at before `sequences` is called, so that nothing waits for the device. Calls in a compiled
graph or a CUDA graph are not recorded; the decoder stack's count of calls shows that.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from knn_moe.errors import NothingReadError
from knn_moe.inference.caches import cache_length, find_cache
from knn_moe.inference.hooks import TokenMask

_UNSEEN: Final = "The model continued from a cache whose tokens were not recorded"
_WAY_OUT: Final = "Give explain the token ids: routing.explain(input_ids)"


@dataclass(frozen=True)
class Step:
    """One call. Shapes: ids [B, T]; real [B, T] bool, None: no padding. `length` is the
    cache's after the call, a tensor if it is on the device."""

    ids: Tensor
    real: Tensor | None
    length: int | Tensor


class TokenHistory:
    """The calls since the model last began a sequence."""

    def __init__(self, mask: TokenMask) -> None:
        self.mask = mask
        self.paused = False
        self._steps: list[Step] = []
        self._lost: str | None = None  # why the steps are not known
        self._cache: weakref.ref[Cache] | None = None
        self._begun: Tensor | None = None  # the count of calls when the first step was seen

    def install(self) -> list[RemovableHandle]:
        """Install the hook. It must come before the hooks of the mask, which drop the mask."""
        return [self.mask.stack.register_forward_hook(self._after, with_kwargs=True)]

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling() or self.paused:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype.is_floating_point:
            self._forget("The model was given embeddings (inputs_embeds) instead of token ids")
            return
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        cache = find_cache(args, kwargs, output)
        width = ids.shape[1]
        known = cache is not None and self._cache is not None and self._cache() is cache
        length = width if cache is None else _length(cache, wait=width > 1 or not known)
        if isinstance(length, int) and length == width:
            self._begin()
        elif not known or length is None:
            self._forget(_UNSEEN)
        if length is None or self._lost is not None:
            return
        self._cache = None if cache is None else weakref.ref(cache)
        real = self.mask.mask
        real = None if real is None or real.shape != ids.shape else real.clone()
        self._steps.append(Step(ids.clone(), real, length))

    def _begin(self) -> None:
        self._steps, self._lost = [], None
        self._begun = self.mask.counts.sums[0].clone()

    def _forget(self, why: str) -> None:
        self._steps, self._lost, self._cache = [], why, None

    def sequences(self, ends: Collection[int] = ()) -> list[Tensor]:
        """Return the ids of each sequence, [n] on the CPU, without padding.

        Args:
            ends: The tokens that end a sequence. What a batch feeds a finished row is left out.

        Raises:
            NothingReadError: It is not known what the model read.
        """
        if self._lost is not None:
            raise NothingReadError(f"{self._lost}. {_WAY_OUT}.")
        earlier = 0 if self._begun is None else int(self._begun) - 1
        missed = int(self.mask.counts.sums[0]) - earlier - len(self._steps)
        if missed:
            raise NothingReadError(
                f"{missed} forward passes ran inside a compiled graph and were not recorded. "
                f"{_WAY_OUT}."
            )
        if not self._steps:
            raise NothingReadError(
                f"The model has read nothing since the memory was attached. {_WAY_OUT}."
            )
        ids, real, prompt = _join_steps(self._steps)
        if len(self._steps) > 1 and len(prompt.unique(dim=0)) < len(prompt):
            raise NothingReadError(
                "The batch holds one prompt several times, as in beam search, which swaps rows "
                f"unseen. {_WAY_OUT}."
            )
        filled = _find_filling(ids, prompt.shape[1], ends)
        return [row[kept] for row, kept in zip(ids, real & ~filled, strict=True)]


def _join_steps(steps: list[Step]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and real tokens of all steps, and the ids of the first. A cache that was cut
    between two steps takes back what was cut. Shapes: [B, n], [B, n] bool, [B, prompt]."""
    ids = real = prompt = torch.empty(0, 0)
    for step in steps:
        new = step.ids.cpu()
        known = int(step.length) - new.shape[1]
        if known == 0:
            ids, real, prompt = new[:, :0], new[:, :0].bool(), new
        if not 0 <= known <= ids.shape[1] or len(new) != len(ids):
            raise NothingReadError(f"{_UNSEEN}. {_WAY_OUT}.")
        kept = torch.ones_like(new, dtype=torch.bool) if step.real is None else step.real.cpu()
        ids = torch.cat([ids[:, :known], new], dim=1)
        real = torch.cat([real[:, :known], kept], dim=1)
    return ids, real, prompt


def _find_filling(ids: Tensor, prompt: int, ends: Collection[int]) -> Tensor:
    """Find what a finished row is fed while others continue: one token repeated after its end.

    Shapes: ids [B, n] → [B, n] bool.
    """
    filled = torch.zeros_like(ids, dtype=torch.bool)
    for row, line in enumerate(ids.tolist()):
        for place in range(prompt, len(line) - 1):
            if line[place] in ends and len(set(line[place + 1 :])) == 1:
                filled[row, place + 1 :] = True
                break
    return filled


def _length(cache: Cache, *, wait: bool) -> int | Tensor | None:
    """Return the length of the cache after a call; None if it does not know.

    Static caches count on the device: `wait` for that, or return a tensor.
    """
    length = cache_length(cache)
    if isinstance(length, Tensor):
        return int(length) if wait else length.clone()
    return length
