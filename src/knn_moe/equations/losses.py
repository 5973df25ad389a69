"""The next-token loss L = Σ_t -log p(y_{t+1} | y_≤t) (§4.1), token by token. Pure torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that does not count


def next_token_losses(logits: Tensor, ids: Tensor, scored: Tensor | None = None) -> Tensor:
    """Return -log p(y_{t+1} | y_≤t) in fp32, 0 where a token does not count.

    One sequence at a time: a batch of wide logits may not fit in fp32 beside itself.

    Shapes: logits [B, T, V]; ids [B, T]; scored [B, T] bool, whether the token after position t
    counts (None: all do). Result [B, T - 1], on the logits' device.
    """
    targets = ids[:, 1:].to(logits.device)
    if scored is not None:
        targets = targets.masked_fill(~scored[:, :-1].to(logits.device), IGNORED)
    return target_losses(logits[:, :-1], targets)


def target_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p(target) in fp32, 0 where the target is IGNORED.

    Shapes: logits [B, T, V]; targets [B, T]. Result [B, T], on the logits' device.
    """
    targets = targets.to(logits.device)
    rows = zip(logits, targets, strict=True)
    losses = [F.cross_entropy(row.float(), ids, reduction="none") for row, ids in rows]
    return torch.stack(losses)
