"""The hooks of an attached memory: mix at each router, find padding and first tokens, count.

Counts are tensors on the router's device: nothing waits for the device, and a compiled graph
updates them like any buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from knn_moe.errors import ConfigError
from knn_moe.inference.caches import cache_length, find_cache
from knn_moe.recall.layer import UNITS, LayerRecall, RouterCall
from knn_moe.routers.find import Router
from knn_moe.routers.intercept import ReplaceLogits, RouterHook, chosen_experts


@dataclass(frozen=True)
class LayerStats:
    """What one layer's memory has done since it was attached. Padding and tokens that are left to
    the router do not count."""

    calls: int
    tokens: int
    mean_confidence: float  # mean λ
    changed: float | None  # share of tokens whose experts changed; None: not counted


class Counts(nn.Module):
    """Running sums, as a buffer so that compilers treat it as static.

    Shape: sums [4] int64: calls, tokens, tokens whose experts changed, and the sum of λ in units
    of 2⁻³². Whole numbers, so that kernels can add to them in any order.
    """

    sums: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4, dtype=torch.int64, device=device), False)

    @torch.no_grad()
    def add(self, confidence: Tensor, changed: Tensor | None, real: Tensor | None) -> None:
        """Count one call. Shapes: confidence, changed, real [T]; no `real`: no padding."""
        real = torch.ones_like(confidence, dtype=torch.bool) if real is None else real
        units = (confidence.double() * UNITS).round().long()
        self.sums[0] += 1
        self.sums[1] += real.sum()
        self.sums[3] += torch.where(real, units, 0).sum()
        if changed is not None:
            self.add_changed(changed, real)

    @torch.no_grad()
    def add_changed(self, changed: Tensor, real: Tensor | None) -> None:
        """Count the changes of a call that is counted otherwise. Shapes: [T]."""
        self.sums[2] += (changed if real is None else changed & real).sum()


class RowSelection:
    """The rows of a batch that use a memory: all of them, unless `choose` says which."""

    def __init__(self, *, empty: bool = False) -> None:
        self.empty = empty
        self.used = not empty  # whether the model ever ran with a row that uses the memory
        self.chosen: Tensor | None = None  # [rows] bool; None: all
        self._on: dict[torch.device, Tensor] = {}

    def choose(self, rows: Tensor) -> None:
        """Select rows. Shapes: rows [rows] bool."""
        self.empty = not bool(rows.any())
        self.chosen = None if bool(rows.all()) else rows
        self._on = {}

    def tokens(self, count: int, batch: int, device: torch.device) -> Tensor | None:
        """Tell which of `count` tokens are of selected rows, row after row; None: all are.

        Rows that `generate` repeats, for beams or several answers, follow each other, as a row's
        tokens do. Result [count] bool, on `device`.
        """
        if self.chosen is None:
            return None
        rows = len(self.chosen)
        if batch % rows or count % rows:
            raise ConfigError(
                f"Memories were chosen for {rows} rows, and the model reads {batch}. Name one for "
                f"each row of the batch."
            )
        if device not in self._on:
            self._on[device] = self.chosen.to(device)
        return self._on[device].repeat_interleave(count // rows)


class RecallHook(RouterHook):
    """Mixes what a layer recalls into its router's logits, and counts what that changed."""

    def __init__(
        self,
        router: Router,
        recall: LayerRecall,
        mask: TokenMask,
        *,
        count_changes: bool,
        selection: RowSelection | None = None,
        spare_first_token: bool = False,
    ) -> None:
        super().__init__(router, self.mix)
        self.recall = recall
        self.spares_first = spare_first_token
        mask.finds_first |= spare_first_token
        self.selection = selection or RowSelection()
        self.kernels_count = recall.counts
        self.mask = mask
        self.count_changes = count_changes
        self.counts = Counts(recall.gamma.device)
        self.called = False
        self.keeps_inputs = False  # for a head, which takes them when the model has run
        self.observer: Callable[[RouterCall], None] | None = None

    def mix(self, inputs: Tensor, logits: Tensor) -> Tensor:
        """Return the logits to use. Shapes: inputs [T, d]; logits [T, N] → [T, N]."""
        if self.selection.empty:
            return logits
        if self.keeps_inputs:
            self.state.inputs = inputs.detach()
        real = self.mask.real(len(inputs), inputs.device)
        selected = self._select(len(inputs), inputs.device)
        if selected is not None:
            real = selected if real is None else selected & real
        counts = self.counts.sums if self.kernels_count else None
        mixed, confidence = self.recall.forward(inputs, logits, counts, real)
        if selected is not None:
            mixed = torch.where(selected[:, None], mixed, logits)
            confidence = confidence.masked_fill(~selected, 0.0)
        self.state.step = inputs, logits, mixed, confidence, real
        return mixed

    def _select(self, count: int, device: torch.device) -> Tensor | None:
        """Tell which tokens use the memory; None: all do. Result [count] bool, on `device`."""
        selected = self.selection.tokens(count, self.mask.batch, device)
        first = self.mask.begins(count, device) if self.spares_first else None
        if first is None:
            return selected
        return ~first if selected is None else selected & ~first

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        super().after(module, args, kwargs, output)
        self.count(module, args, kwargs, output)

    def count(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Count what the call changed, from what the router returned."""
        state = self.state
        step, state.step = state.step, None
        if step is None or output is None:
            return
        inputs, logits, mixed, confidence, real = step
        changed = None
        counted = self.kernels_count and self.recall.counts_changes
        uncounted = self.count_changes and not counted
        if uncounted or self.observer is not None:
            unmixed = self._unmixed(module, args, kwargs, logits)
            chosen = chosen_experts(self.router, unmixed, logits)
            used = chosen_experts(self.router, output, mixed)
            changed = (chosen != used).any(dim=-1)
            if self.observer is not None:
                seen = RouterCall(
                    self.router.layer,
                    self.recall,
                    inputs,
                    logits=logits,
                    mixed=mixed,
                    before=chosen,
                    after=used,
                    confidence=confidence,
                )
                self.observer(seen)
        if not self.kernels_count:
            self.counts.add(confidence, changed, real)
        elif uncounted and changed is not None:
            self.counts.add_changed(changed, real)
        if not torch.compiler.is_compiling():
            self.called = True

    def _unmixed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], logits: Tensor
    ) -> Any:
        """Return what the router would have returned on its own logits."""
        if module is not self.router.module:
            return None  # the whole block's forward: too much to run twice
        with torch.no_grad(), ReplaceLogits(self.router, lambda inputs, own: logits):
            return module.forward(*args, **kwargs)

    def was_called(self) -> bool:
        """Whether the router was called, or no row used the memory."""
        return self.called or not self.selection.used or int(self.counts.sums[0]) > 0

    def stats(self) -> LayerStats:
        """Return the counts so far."""
        calls, tokens, changed, confidence = self.counts.sums.tolist()
        return LayerStats(
            calls=calls,
            tokens=tokens,
            mean_confidence=confidence / UNITS / max(tokens, 1),
            changed=changed / max(tokens, 1) if self.count_changes else None,
        )


class HookStack(RouterHook):
    """The hooks of several memories at one router, one after the other."""

    def __init__(self, hooks: Sequence[RecallHook]) -> None:
        super().__init__(hooks[0].router, self.mix)
        self.hooks = hooks

    def mix(self, inputs: Tensor, logits: Tensor) -> Tensor:
        for hook in self.hooks:
            logits = hook.mix(inputs, logits)
        return logits

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        super().after(module, args, kwargs, output)
        for hook in self.hooks:
            hook.count(module, args, kwargs, output)


class TokenMask:
    """Tells which tokens are padding, and which are the first of a sequence. Routers cannot: they
    see all tokens flattened, without a mask."""

    def __init__(self, model: nn.Module, routers: list[Router]) -> None:
        self.stack = _decoder_stack(model, routers)
        self.counts = Counts(routers[0].device if routers else torch.device("cpu"))
        self.ran_eagerly = False
        self.mask: Tensor | None = None
        self.finds_first = False  # whether a hook needs to know first tokens
        self.first: Tensor | None = None
        self.batch = 0  # rows of this step

    def install(self, on_run: Callable[[], None]) -> list[RemovableHandle]:
        """Read the mask before each run of the decoder stack; call `on_run` after the first."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.mask = _real_tokens(args, kwargs)
            self.first = _first_tokens(args, kwargs, self.mask) if self.finds_first else None
            read = _tokens(args, kwargs)
            self.batch = 0 if read is None else len(read)
            self.counts.sums[0] += 1

        def after(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            self.mask = self.first = None
            if output is not None and not torch.compiler.is_compiling() and not self.ran_eagerly:
                self.ran_eagerly = True
                on_run()

        return [
            self.stack.register_forward_pre_hook(before, with_kwargs=True),
            self.stack.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def ran(self) -> bool:
        """Whether the model has run."""
        return int(self.counts.sums[0]) > 0

    def real(self, tokens: int, device: torch.device) -> Tensor | None:
        """Return [tokens] bool on `device`; None where nothing is known of padding."""
        return _flatten(self.mask, tokens, device)

    def begins(self, tokens: int, device: torch.device) -> Tensor | None:
        """Tell which tokens are the first of a sequence: [tokens] bool on `device`; None: none."""
        return _flatten(self.first, tokens, device)


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
    first = _row_begins(tokens, find_cache(args, kwargs), real)
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or tokens.shape[1] == 1:
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
