"""How likely a causal language model finds text, with a memory attached or without.

Knows token ids, logits and caches; nothing of memories, tokenizers or tasks. An attention mask is
passed only where contexts are padded on the left: on the right, no real token sees padding. Sums
are in fp32.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from knn_moe.equations.losses import next_token_losses, target_losses
from knn_moe.errors import ConfigError
from knn_moe.routers.model_state import input_device, unwrap

# Layers whose cache is keys and values only, so that its rows can be repeated.
_REPEATABLE: Final = (DynamicLayer, DynamicSlidingWindowLayer)


@dataclass(frozen=True)
class TokenLosses:
    """The losses of W windows of L tokens, on the CPU.

    Shapes: nll [W, L - 1] fp32, the negative log-likelihood of each token but the first;
    correct [W, L - 1] bool, whether the token was the likeliest.
    """

    nll: Tensor
    correct: Tensor


@torch.no_grad()
def token_losses(model: nn.Module, windows: Tensor, batch_size: int) -> TokenLosses:
    """Score every token of the windows but the first.

    Args:
        windows: Token ids without padding, of at least 2 tokens each.
        batch_size: Windows for each forward pass.

    Shapes: windows [W, L].

    Raises:
        ConfigError: The shape or the batch size does not fit.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}.")
    if windows.ndim != 2 or windows.shape[1] < 2:
        raise ConfigError(f"windows must have the shape [W, L ≥ 2], got {list(windows.shape)}.")
    device = input_device(model)
    nll = torch.empty(len(windows), windows.shape[1] - 1)
    correct = torch.empty(nll.shape, dtype=torch.bool)
    for start in range(0, len(windows), batch_size):
        rows = slice(start, start + batch_size)
        ids = windows[rows].to(device)
        logits = model(ids, use_cache=False).logits
        nll[rows] = next_token_losses(logits, ids).cpu()
        correct[rows] = (logits[:, :-1].argmax(dim=-1) == ids[:, 1:].to(logits.device)).cpu()
    return TokenLosses(nll, correct)


@torch.no_grad()
def choice_scores(
    model: nn.Module,
    contexts: Tensor,
    choices: Tensor,
    scored: Tensor,
    begin: Tensor | None = None,
    *,
    context_losses: bool = True,
) -> tuple[Tensor, Tensor]:
    """Score the choices of one batch of contexts.

    A context is read once if the model's cache can be repeated for its choices.

    Args:
        contexts: Token ids, padded on the left.
        choices: Token ids after each context, padded on the right.
        scored: Which tokens of the choices count.
        begin: The place of each context's first token. None: there is no padding.
        context_losses: Whether the losses of the contexts are needed. Without them, logits are
            computed only where a choice is scored.

    Returns:
        The log-likelihood of each choice's scored tokens, and the mean loss of each context's
        tokens (NaN for a context of one token, or if it is not needed).

    Shapes: contexts [B, C]; choices, scored (bool) [B, A, N]; begin [B]. Results [B, A] and [B],
    fp32, on the CPU.
    """
    device = input_device(model)
    context = _Contexts(contexts.to(device), None if begin is None else begin.to(device))
    keep = {} if context_losses else _keep_last(model)
    read = model(context.ids, use_cache=True, **context.arguments(), **keep)
    cache = getattr(read, "past_key_values", None)
    if begin is not None and not _is_repeatable(cache):
        return _score_by_length(model, contexts, choices, scored, begin, context_losses)
    means = torch.full((len(contexts),), torch.nan)
    if context_losses:
        means = context.mean_losses(read.logits).cpu()
    count, kept, flat = choices.shape[1], scored.flatten(0, 1), choices.to(device).flatten(0, 1)
    # On the device until the end: every copy to the CPU would wait for it.
    losses = torch.zeros(kept.shape, device=device)
    last = read.logits[:, -1:].repeat_interleave(count, dim=0)
    losses[:, :1] = target_losses(last, flat[:, :1]).to(device)
    for rows, length in _group_by_length(kept):
        places = rows.to(device)
        owners, part = context.select(places // count), flat[places, :length]
        rest = _remaining_losses(model, owners, part, cache, places // count)
        losses[places, 1:length] = rest.to(device)
    total = losses.cpu().masked_fill(~kept, 0.0).sum(dim=1)
    return -total.view(choices.shape[:2]), means


@dataclass(frozen=True)
class _Contexts:
    """Contexts padded on the left. Shapes: ids [B, C]; begin [B], None: there is no padding."""

    ids: Tensor
    begin: Tensor | None

    def select(self, rows: Tensor) -> _Contexts:
        return _Contexts(self.ids[rows], None if self.begin is None else self.begin[rows])

    def arguments(self, start: int = 0, more: int = 0) -> dict[str, Tensor]:
        """Return a model's mask and positions from `start` on, with `more` tokens at the end."""
        if self.begin is None:
            return {}
        place = torch.arange(self.ids.shape[1] + more, device=self.ids.device)
        positions = (place - self.begin[:, None]).clamp(min=0)
        mask = (place >= self.begin[:, None]).long()
        return {"attention_mask": mask, "position_ids": positions[:, start:]}

    def mean_losses(self, logits: Tensor) -> Tensor:
        """Return the mean loss of each context's tokens. Shapes: logits [B, C, V] → [B]."""
        losses = next_token_losses(logits, self.ids)
        if self.begin is None:
            return losses.mean(dim=1)
        begin = self.begin[:, None].to(losses.device)
        real = torch.arange(losses.shape[1], device=losses.device) >= begin
        return losses.masked_fill(~real, 0.0).sum(dim=1) / real.sum(dim=1)


def _keep_last(model: nn.Module) -> dict[str, int]:
    """Return the argument with which a model computes the last logits only, if it has one."""
    known = "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters
    return {"logits_to_keep": 1} if known else {}


def _score_by_length(
    model: nn.Module,
    contexts: Tensor,
    choices: Tensor,
    scored: Tensor,
    begin: Tensor,
    context_losses: bool,
) -> tuple[Tensor, Tensor]:
    """Score contexts of each length by themselves, for models that padding would disturb."""
    scores, means = torch.empty(choices.shape[:2]), torch.empty(len(contexts))
    for start in begin.unique().tolist():
        rows = (begin == start).nonzero().flatten()
        parts = contexts[rows, start:], choices[rows], scored[rows]
        found = choice_scores(model, *parts, context_losses=context_losses)
        scores[rows], means[rows] = found
    return scores, means


def _group_by_length(kept: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield rows of more than one token, at most twice as long as each other, and their length.

    If all choices were padded to the longest, most of what the model reads would be padding.
    """
    places = torch.arange(1, kept.shape[1] + 1)
    lengths = (kept * places).amax(dim=1)
    for power in range(1, kept.shape[1].bit_length()):
        rows = ((lengths >= 2**power) & (lengths < 2 ** (power + 1))).nonzero().squeeze(1)
        if len(rows):
            yield rows, int(lengths[rows].max())


def _remaining_losses(
    model: nn.Module, contexts: _Contexts, choices: Tensor, cache: Any, rows: Tensor
) -> Tensor:
    """Return the losses of the choices' tokens but the first, from the contexts' cache if possible.

    Shapes: contexts of [b, C]; choices [b, N]; rows [b] of the cache. Result [b, N - 1].
    """
    if _is_repeatable(cache):
        # These layers replace their tensors, so that a shallow copy leaves the original as it is.
        chosen = copy.copy(cache)
        chosen.layers = [copy.copy(layer) for layer in cache.layers]
        chosen.batch_select_indices(rows)
        more = contexts.arguments(contexts.ids.shape[1], choices.shape[1] - 1)
        read = model(choices[:, :-1], past_key_values=chosen, use_cache=True, **more)
        logits = read.logits
    else:
        whole = torch.cat([contexts.ids, choices], dim=1)
        logits = model(whole, use_cache=False).logits[:, -choices.shape[1] : -1]
    return target_losses(logits, choices[:, 1:])


def _is_repeatable(cache: Any) -> bool:
    """Return whether rows of a cache can be selected.

    By exact type: hybrid layers inherit a method that does not repeat their recurrent state.
    """
    return type(cache) is DynamicCache and all(type(x) in _REPEATABLE for x in cache.layers)


@torch.no_grad()
def mean_losses(
    model: nn.Module, texts: Sequence[Sequence[int]], begin: Sequence[int] | None = None
) -> Tensor:
    """Return the mean loss of the tokens of each text, in one batch padded on the right.

    Args:
        texts: Token ids, of any lengths.
        begin: The first token of each text that counts. None: the second token.

    Shapes: result [texts] fp32, on the CPU; NaN where no token counts.
    """
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    ids = ids.to(input_device(model))
    losses = next_token_losses(model(ids, use_cache=False).logits, ids).cpu()
    first = torch.tensor([max(place, 1) - 1 for place in begin or [1] * len(texts)])[:, None]
    last = torch.tensor([len(text) - 1 for text in texts])[:, None]
    place = torch.arange(longest - 1)
    inside = (place >= first) & (place < last)
    return losses.masked_fill(~inside, 0.0).sum(dim=1) / (last - first).squeeze(1)
