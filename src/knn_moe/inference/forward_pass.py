"""The forward pass that a thread is in: its padding, its first tokens, and which rows use a memory.

Routers see all tokens flattened, without a mask. Hooks on the decoder stack around them read what
the pass was called with. Each thread has its own pass, so that threads do not meet; what an
interrupted pass leaves is replaced by the next one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from knn_moe.inference.caches import cache_length, find_cache, flat_length
from knn_moe.inference.rows import ALL_ROWS, NO_ROWS, Chosen, Rows, RowSlots
from knn_moe.recall.layer import RouterCall
from knn_moe.routers.find import Router
from knn_moe.routers.intercept import NotCopied, PerThread


class _Pass:
    """What a thread knows of its pass."""

    mask: Tensor | None = None  # [B, T] bool, real tokens; None: all are, or nothing is known
    first: Tensor | None = None  # [B, T] bool, first tokens; None: none is
    batch = 0  # rows
    chosen: Chosen | None = None  # None: outside a pass
    ends_later = False  # whether the whole model runs, and ends the pass after the decoder stack
    # Of this thread's passes, not only of this one:
    observer: Callable[[RouterCall], None] | None = None
    aside = False  # whether they are neither counted nor remembered
    # Set: the memory does nothing, and the experts [T, top_k] of each layer's router go here.
    alone: Callable[[int, Tensor], None] | None = None


class ForwardPass(NotCopied):
    """Tells a router's hook about the forward pass that its thread is in.

    Args:
        model: The model.
        routers: Its routers, or some of them.
        choose: Returns what the rows of a pass use that begins in this thread. None: the memories
            have no names.
    """

    def __init__(
        self,
        model: nn.Module,
        routers: list[Router],
        choose: Callable[[], Chosen] | None = None,
    ) -> None:
        self.stack = _decoder_stack(model, routers)
        self._threads = PerThread(_Pass)
        self.finds_first = False  # whether a hook needs to know first tokens
        self.finished = Finished(routers[0].device if routers else torch.device("cpu"))
        self.used: dict[str, bool] = defaultdict(bool)  # whether a row ever used the memory
        self.closed = False  # whether passes that begin are left alone
        self.handle: object = None  # what has put it on the model
        self._choose = choose
        self._on_first: Callable[[], None] = _nothing
        self._on_last: Callable[[], None] = _nothing
        self._running: dict[int, threading.Thread] = {}

    @property
    def now(self) -> _Pass:
        """The pass that this thread is in."""
        return self._threads.state

    def tell(self, on_first: Callable[[], None], on_last: Callable[[], None]) -> None:
        """Call `on_first` when the first pass has ended, and `on_last` when the last one has that
        was running when `close` was called."""
        self._on_first, self._on_last = on_first, on_last

    def install(self) -> list[RemovableHandle]:
        """Put hooks on the decoder stack."""
        return [
            self.stack.register_forward_pre_hook(self.before, with_kwargs=True),
            self.stack.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    # A hook that another thread is just removing may be called without its last argument.
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Read what the pass is called with."""
        if kwargs is None or not self._begin():
            return
        now = self.now
        now.mask = _real_tokens(args, kwargs)
        now.first = _first_tokens(args, kwargs, now.mask) if self.finds_first else None
        read = _tokens(args, kwargs)
        now.batch = 0 if read is None else len(read)
        now.chosen = None if self._choose is None else self._choose()

    def after(self, module: nn.Module, args: object, kwargs: object, output: Any = None) -> None:
        """Forget it. After an exception there is no output."""
        if not self.active():
            return
        now = self.now
        if output is None:
            now.mask = now.first = now.chosen = None
            if not now.ends_later:
                self.end()
            return
        for name, rows in ({} if now.chosen is None else now.chosen.rows).items():
            self.used[name] |= not rows.empty and now.alone is None
        now.mask = now.first = now.chosen = None
        if not now.aside and now.alone is None:
            self.finished.passes += 1
        if not torch.compiler.is_compiling():
            if not self.finished.eagerly and now.alone is None:
                self.finished.eagerly = True
                self._on_first()
            if not now.ends_later:
                self.end()

    def _begin(self) -> bool:
        """Note that a pass runs in this thread; False: it is left alone."""
        if torch.compiler.is_compiling():
            return not self.closed
        thread = threading.get_ident()
        self._running[thread] = threading.current_thread()
        if self.closed:
            self.end()
        return not self.closed

    def end(self) -> None:
        """Note that this thread's pass has ended."""
        self._running.pop(threading.get_ident(), None)
        if self.closed and not self.runs_elsewhere():
            self._on_last()

    def active(self) -> bool:
        """Whether this thread's pass, or a router that is called outside any, is attended to."""
        if torch.compiler.is_compiling() or not self.closed:
            return not self.closed
        return threading.get_ident() in self._running

    def close(self) -> None:
        """Leave passes alone that begin from now on. Those that are running end as they began."""
        self.closed = True

    def runs_elsewhere(self) -> bool:
        """Whether another thread is in a pass."""
        here = threading.get_ident()
        threads = list(self._running.items())
        return any(thread.is_alive() for ident, thread in threads if ident != here)

    def rows(self, name: str) -> Rows:
        """Return the rows that use the memory `name`."""
        chosen = self._chosen()
        return ALL_ROWS if chosen is None else chosen.rows.get(name, NO_ROWS)

    def slots(self, number: int) -> RowSlots | None:
        """Return the slots of memories that are recalled together; None: nothing is chosen."""
        chosen = self._chosen()
        return None if chosen is None else chosen.slots[number]

    def _chosen(self) -> Chosen | None:
        chosen = self.now.chosen
        # Compiled code reads the choice once; a pass that was interrupted may have left another.
        read = chosen is not None and torch.compiler.is_compiling()
        return chosen if read or self._choose is None else self._choose()

    def real(self, tokens: int, device: torch.device) -> Tensor | None:
        """Return [tokens] bool on `device`; None where nothing is known of padding."""
        return _flatten(self.now.mask, tokens, device)

    def begins(self, tokens: int, device: torch.device) -> Tensor | None:
        """Tell which tokens are the first of a sequence: [tokens] bool on `device`; None: none."""
        return _flatten(self.now.first, tokens, device)


class Finished(nn.Module):
    """Counts finished passes on the device, as a buffer so that compilers treat it as static.

    Shape: passes [] int64.
    """

    passes: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.eagerly = False  # whether one of them was not compiled
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64, device=device), False)


def _nothing() -> None:
    pass


def _flatten(mask: Tensor | None, tokens: int, device: torch.device) -> Tensor | None:
    if mask is None or mask.numel() != tokens:
        return None
    # Contiguous: of one sequence's mask, a diagonal, flatten makes a strided view.
    return mask.flatten().to(device).contiguous()


def _decoder_stack(model: nn.Module, routers: list[Router]) -> nn.Module:
    """Return the innermost pretrained model around all routers. It is called with the mask."""
    paths = [router.name.split(".") for router in routers]
    shared = 0
    while all(len(path) > shared for path in paths) and len({path[shared] for path in paths}) == 1:
        shared += 1
    for length in range(shared, 0, -1):
        module = model.get_submodule(".".join(paths[0][:length]))
        if isinstance(module, PreTrainedModel):
            return module
    return model


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what is read in this step, [B, T] or [B, T, d]."""
    tokens: Tensor | None = kwargs.get("input_ids", args[0] if args else None)
    return kwargs.get("inputs_embeds") if tokens is None else tokens


def _real_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the real tokens of this step [B, T], from the forward's arguments; None if all are."""
    tokens = _tokens(args, kwargs)
    flat = flat_length(kwargs)
    if flat is not None and tokens is not None:
        # A flat batch may be padded at its end; its attention mask is over the cache's blocks.
        return (torch.arange(tokens.shape[1], device=flat.device) < flat).expand(tokens.shape[:2])
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, Mapping):
        mask = next(iter(mask.values()), None)
    if not isinstance(mask, Tensor) or tokens is None or tokens.shape[1] == 1:
        return None
    length = tokens.shape[1]
    if mask.ndim == 2:
        return mask[:, -length:].bool()
    # Attention masks of a static cache, [B, 1, T, cache]: a token sees itself unless it is padding.
    diagonal = torch.diagonal(mask[:, 0, :length, :length], dim1=-2, dim2=-1)
    return diagonal if diagonal.dtype == torch.bool else diagonal == 0


def _first_tokens(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], real: Tensor | None
) -> Tensor | None:
    """Return the tokens of this step that begin a sequence [B, T]; None if none does.

    A decode step costs nothing: it is one token after a cache that is not empty, and no tensor is
    read to know that.
    """
    tokens = _tokens(args, kwargs)
    if tokens is None:
        return None
    positions = kwargs.get("position_ids")
    flat = flat_length(kwargs) is not None and isinstance(positions, Tensor)
    first = None if flat else _row_begins(tokens, find_cache(args, kwargs), real)
    if not isinstance(positions, Tensor) or (tokens.shape[1] == 1 and not flat):
        return first
    # Several sequences in one row: positions start anew in each.
    anew = (positions == 0).all(dim=0) if positions.ndim == 3 else positions == 0
    anew = anew.expand(tokens.shape[:2])
    anew = anew if real is None else anew & real
    return anew if first is None else anew | first


def _row_begins(tokens: Tensor, cache: Cache | None, real: Tensor | None) -> Tensor | None:
    """Return the first real token of each row [B, T]; None if the rows continue a cache."""
    length = 0 if cache is None else cache_length(cache)
    if isinstance(length, int) and length > 0:
        return None
    if tokens.shape[1] == 1 and not isinstance(length, int):
        return None
    if real is None:
        real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    first = real & (real.cumsum(dim=1) == 1)
    return first & (length.to(first.device) == 0) if isinstance(length, Tensor) else first
