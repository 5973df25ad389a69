"""How likely a causal language model finds text, with a memory attached or without.

Knows token ids, logits and caches; nothing of memories, tokenizers or tasks. No attention mask is
passed: every token is real. Sums are in fp32 whatever the model's dtype.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from knn_moe.errors import ConfigError
from knn_moe.routers.model_state import input_device, unwrap

OnBatch = Callable[[int], None]  # rows done so far

# Layers that keep keys and values of each token, and repeat all they keep.
_REPEATABLE: Final = (DynamicLayer, DynamicSlidingWindowLayer)


@dataclass(frozen=True)
class TokenLosses:
    """Of W windows of L tokens, on the CPU. Shapes: nll [W, L - 1] fp32, the negative
    log-likelihood of each token but the first; correct [W, L - 1] bool, was it the likeliest."""

    nll: Tensor
    correct: Tensor


@torch.no_grad()
def token_losses(
    model: nn.Module, windows: Tensor, batch_size: int, on_batch: OnBatch | None = None
) -> TokenLosses:
    """Score every token of full windows but the first. Shapes: windows [W, L]."""
    _check(batch_size, windows.ndim == 2 and windows.shape[1] >= 2, "windows [W, L ≥ 2]", windows)
    device = input_device(model)
    nll = torch.empty(len(windows), windows.shape[1] - 1)
    correct = torch.empty(nll.shape, dtype=torch.bool)
    for start in range(0, len(windows), batch_size):
        rows = slice(start, start + batch_size)
        ids = windows[rows].to(device)
        logits = model(ids, use_cache=False).logits[:, :-1]
        nll[rows] = _losses(logits, ids[:, 1:]).cpu()
        correct[rows] = (logits.argmax(dim=-1) == ids[:, 1:].to(logits.device)).cpu()
        if on_batch:
            on_batch(start + len(ids))
    return TokenLosses(nll, correct)


@torch.no_grad()
def continuation_scores(
    model: nn.Module,
    contexts: Tensor,
    continuations: Tensor,
    batch_size: int,
    on_batch: OnBatch | None = None,
) -> Tensor:
    """Log-likelihood of each of A continuations given its context, summed over its tokens.

    A context is read once where the model's cache can be repeated for its continuations, else
    once for each. `batch_size` counts contexts: `batch_size` × A rows go through the model.
    Shapes: contexts [B, C]; continuations [B, A, N]. Result [B, A] fp32, on the CPU.
    """
    fits = contexts.ndim == 2 and continuations.ndim == 3 and len(contexts) == len(continuations)
    fits = fits and min(*contexts.shape[1:], *continuations.shape[1:]) > 0
    _check(batch_size, fits, "contexts [B, C] and continuations [B, A, N]", contexts, continuations)
    device = input_device(model)
    scores = torch.empty(continuations.shape[:2])
    shared = True
    for start in range(0, len(contexts), batch_size):
        rows = slice(start, start + batch_size)
        context, options = contexts[rows].to(device), continuations[rows].to(device)
        scored = _read_context_once(model, context, options) if shared else None
        shared = scored is not None
        scores[rows] = (_read_whole(model, context, options) if scored is None else scored).cpu()
        if on_batch:
            on_batch(start + len(context))
    return scores


@torch.no_grad()
def choice_scores(
    model: nn.Module, contexts: Tensor, options: Tensor, scored: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each option's scored tokens, and the contexts' mean loss per token.

    One batch of contexts of one length, whose options are padded on the right: no token sees what
    comes after it. Shapes: contexts [B, C]; options, scored (bool) [B, A, N] → [B, A], [B] fp32 on
    the CPU; NaN for a context of one token.
    """
    device = input_device(model)
    context, flat = contexts.to(device), options.to(device).flatten(0, 1)
    read = model(context, use_cache=True)
    own = _losses(read.logits[:, :-1], context[:, 1:]).mean(dim=1).cpu()
    choices = options.shape[1]
    kept = scored.flatten(0, 1)
    losses = torch.zeros(kept.shape)
    losses[:, :1] = _losses(
        read.logits[:, -1:].repeat_interleave(choices, dim=0), flat[:, :1]
    ).cpu()
    cache = getattr(read, "past_key_values", None)
    for rows, length in _by_length(kept):
        part = flat[rows.to(device), :length]
        asking = (rows // choices).to(device)
        losses[rows, 1:length] = _rest(model, context[asking], part, cache, asking).cpu()
    total = losses.masked_fill(~kept, 0.0).sum(dim=1)
    return -total.view(options.shape[:2]), own


def _by_length(kept: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Rows of more than one token, with others at most twice as long, and the longest's length.

    Options differ in length: padded all alike, most of what a model would read is padding.
    """
    places = torch.arange(1, kept.shape[1] + 1)
    lengths = (kept * places).amax(dim=1)
    for power in range(1, kept.shape[1].bit_length()):
        rows = ((lengths >= 2**power) & (lengths < 2 ** (power + 1))).nonzero().squeeze(1)
        if len(rows):
            yield rows, int(lengths[rows].max())


def _rest(model: nn.Module, context: Tensor, options: Tensor, cache: Any, rows: Tensor) -> Tensor:
    """Losses of the options' tokens but the first; by way of the contexts' cache, if it has rows
    that can be chosen. Shapes: context [b, C]; options [b, N]; rows [b] of the cache → [b, N - 1].
    """
    if _repeatable(cache):
        chosen = copy.deepcopy(cache)
        chosen.batch_select_indices(rows)
        logits = model(options[:, :-1], past_key_values=chosen, use_cache=True).logits
    else:
        whole = torch.cat([context, options], dim=1)
        length = options.shape[1]
        logits = model(whole, use_cache=False).logits[:, -length:-1]
    return _losses(logits, options[:, 1:])


@torch.no_grad()
def mean_losses(
    model: nn.Module, texts: Sequence[Sequence[int]], begin: Sequence[int] | None = None
) -> Tensor:
    """The mean loss of each text's tokens from its `begin` on, or all but the first; NaN for none:
    one batch, padded on the right. Shapes: ids of T_b tokens each → [B] fp32, on the CPU."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    ids = ids.to(input_device(model))
    losses = _losses(model(ids, use_cache=False).logits[:, :-1], ids[:, 1:]).cpu()
    first = torch.tensor([max(place, 1) - 1 for place in begin or [1] * len(texts)])[:, None]
    last = torch.tensor([len(text) - 1 for text in texts])[:, None]
    place = torch.arange(longest - 1)
    inside = (place >= first) & (place < last)
    return losses.masked_fill(~inside, 0.0).sum(dim=1) / (last - first).squeeze(1)


def _repeatable(cache: Any) -> bool:
    """Whether rows of a cache can be repeated and chosen.

    By exact type: hybrid layers inherit a repeat that leaves their recurrent state as it was.
    """
    return type(cache) is DynamicCache and all(type(x) in _REPEATABLE for x in cache.layers)


def _read_context_once(model: nn.Module, context: Tensor, options: Tensor) -> Tensor | None:
    """Scores by way of the context's cache; None if it cannot be repeated.

    Shapes: context [b, C]; options [b, A, N]. Result [b, A].
    """
    takes = inspect.signature(unwrap(model).forward).parameters
    only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    read = model(context, use_cache=True, **only_last)
    rows, choices, length = options.shape
    cache: Any = getattr(read, "past_key_values", None)
    if not _repeatable(cache):
        return None
    cache.batch_repeat_interleave(choices)
    flat = options.flatten(0, 1)
    first = read.logits[:, -1:].repeat_interleave(choices, dim=0)
    rest = model(flat, past_key_values=cache, use_cache=True).logits[:, : length - 1]
    losses = torch.cat([_losses(first, flat[:, :1]), _losses(rest, flat[:, 1:])], dim=1)
    return -losses.sum(dim=1).view(rows, choices)


def _read_whole(model: nn.Module, context: Tensor, options: Tensor) -> Tensor:
    """Scores by reading each continuation behind its context. Shapes as `_read_context_once`."""
    rows, choices, length = options.shape
    flat = options.flatten(0, 1)
    ids = torch.cat([context.repeat_interleave(choices, dim=0), flat], dim=1)
    logits = model(ids, use_cache=False).logits[:, -length - 1 : -1]
    return -_losses(logits, flat).sum(dim=1).view(rows, choices)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in fp32, a row at a time: wide logits of a batch may not fit beside it.

    Shapes: logits [b, T, V]; targets [b, T]. Result [b, T].
    """
    targets = targets.to(logits.device)
    rows = zip(logits, targets, strict=True)
    return torch.stack([F.cross_entropy(row.float(), ids, reduction="none") for row, ids in rows])


def _check(batch_size: int, fits: bool, wanted: str, *given: Tensor) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}.")
    if not fits:
        shown = " and ".join(str(list(tensor.shape)) for tensor in given)
        raise ConfigError(f"Scoring takes {wanted} of token ids, got {shown}.")
