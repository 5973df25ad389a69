"""What the model read last: the token ids of its last sequences, prompt and decoded tokens alike.

A hook on the decoder stack copies the ids of each call and the length of the cache. No value is
looked at before `sequences` is called, so that nothing waits for the device. Calls in a compiled
graph or a CUDA graph are not recorded, but counted. Each thread has its own history.
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
from knn_moe.inference.caches import cache_length, find_cache, flat_length
from knn_moe.inference.forward_pass import Finished, ForwardPass
from knn_moe.routers.intercept import NotCopied, PerThread

_UNSEEN: Final = "The model continued from a cache whose tokens were not recorded"
_WAY_OUT: Final = "Give explain the token ids: routing.explain(input_ids)"


@dataclass(frozen=True)
class Step:
    """One call. Shapes: ids [B, T]; real [B, T] bool, None: no padding. `length` is the
    cache's after the call, a tensor if it is on the device."""

    ids: Tensor
    real: Tensor | None
    length: int | Tensor


class _Sequence:
    """The calls since a thread's model last began a sequence."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.lost: str | None = None  # why the steps are not known
        self.cache: weakref.ref[Cache] | None = None
        self.unrecorded: Tensor | None = None  # calls without a record before the first step

    def begin(self, unrecorded: Tensor) -> None:
        self.steps, self.lost, self.unrecorded = [], None, unrecorded

    def forget(self, why: str) -> None:
        self.steps, self.lost, self.cache = [], why, None


class TokenHistory(NotCopied):
    """What each thread's model read last."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        self.forward_pass = forward_pass
        self._last = PerThread(_Sequence)
        self._unrecorded = Finished(forward_pass.finished.passes.device)

    def install(self) -> list[RemovableHandle]:
        """Install the hook. It must come before those of the pass, which forget the mask."""
        return [self.forward_pass.stack.register_forward_hook(self.after, with_kwargs=True)]

    # A hook that another thread is just removing may be called without its last argument.
    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = None
    ) -> None:
        """Copy the ids of a call."""
        if output is None or self.forward_pass.now.aside:
            return
        if torch.compiler.is_compiling():
            self._unrecorded.passes += 1
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        last = self._last.state
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype.is_floating_point:
            last.forget("The model was given embeddings (inputs_embeds) instead of token ids")
            return
        if flat_length(kwargs) is not None:
            last.forget("The model read sequences of several requests in one flat batch")
            return
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            self._unrecorded.passes += 1
            return
        cache = find_cache(args, kwargs, output)
        width = ids.shape[1]
        known = cache is not None and last.cache is not None and last.cache() is cache
        length = width if cache is None else _length(cache, wait=width > 1 or not known)
        if isinstance(length, int) and length == width:
            last.begin(self._unrecorded.passes.clone())
        elif not known or length is None:
            last.forget(_UNSEEN)
        if length is None or last.lost is not None:
            return
        last.cache = None if cache is None else weakref.ref(cache)
        real = self.forward_pass.now.mask
        real = None if real is None or real.shape != ids.shape else real.clone()
        last.steps.append(Step(ids.clone(), real, length))

    def sequences(self, ends: Collection[int] = ()) -> list[Tensor]:
        """Return the ids of each sequence that this thread's model read, [n] on the CPU, without
        padding.

        Args:
            ends: The tokens that end a sequence. What a batch feeds a finished row is left out.

        Raises:
            NothingReadError: It is not known what the model read.
        """
        last = self._last.state
        if last.lost is not None:
            raise NothingReadError(f"{last.lost}. {_WAY_OUT}.")
        earlier = 0 if last.unrecorded is None else int(last.unrecorded)
        missed = int(self._unrecorded.passes) - earlier
        if missed:
            raise NothingReadError(
                f"{missed} forward passes ran inside a compiled graph and were not recorded. "
                f"{_WAY_OUT}."
            )
        if not last.steps:
            raise NothingReadError(
                f"The model has read nothing since the memory was attached. {_WAY_OUT}."
            )
        ids, real, prompt = _join_steps(last.steps)
        if len(last.steps) > 1 and len(prompt.unique(dim=0)) < len(prompt):
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
