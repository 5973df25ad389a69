"""The next-token loss L = Σ_t -log p(y_{t+1} | y_≤t) (§4.1), token by token, and the loss of a
choice among answers. Pure torch."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED: Final = -100  # a target that does not count
_NUMBERS: Final = 1 << 27  # logits that are held in fp32 at a time


def next_token_losses(logits: Tensor, ids: Tensor, scored: Tensor | None = None) -> Tensor:
    """Return -log p(y_{t+1} | y_≤t) in fp32, 0 where a token does not count.

    Shapes: logits [B, T, V]; ids [B, T]; scored [B, T] bool, whether the token after position t
    counts (None: all do). Result [B, T - 1], on the logits' device.
    """
    targets = ids[:, 1:].to(logits.device)
    if scored is not None:
        targets = targets.masked_fill(~scored[:, :-1].to(logits.device), IGNORED)
    return target_losses(logits[:, :-1], targets)


def target_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p(target) in fp32, 0 where the target is IGNORED.

    Some sequences at a time: a whole batch of wide logits may not fit in fp32 beside itself.

    Shapes: logits [B, T, V]; targets [B, T]. Result [B, T], on the logits' device.
    """
    targets = targets.to(logits.device)
    rows = max(1, _NUMBERS // max(logits[:1].numel(), 1))
    losses = [
        F.cross_entropy(part.flatten(0, 1).float(), ids.flatten(), reduction="none").view(ids.shape)
        for part, ids in zip(logits.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(losses)


def choice_losses(scores: Tensor, lines: Tensor) -> Tensor:
    """Return -log of the right choice's share among all choices of its question: softmax of scores.

    Shapes: scores [B], of every line; lines [Q, C] int64, the lines of each question's choices, the
    right one first and -1 where there are fewer than C. Result [Q].
    """
    found = scores[lines.clamp(min=0)].masked_fill(lines < 0, -torch.inf)
    return found.logsumexp(dim=1) - found[:, 0]
