"""Draw the next token of each request, by its own temperature, top_p and seed.

Knows logits and random numbers; nothing of models or requests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request's tokens are drawn, and what is told of them."""

    temperature: float = 1.0  # 0: always the most likely token
    top_p: float = 1.0  # draw among the most likely tokens that have this share
    seed: int | None = None  # None: another one each time
    logprobs: int | None = None  # alternatives told beside each token; None: nothing is told


@dataclass(frozen=True)
class Token:
    """A token that was drawn, and the log-probabilities that the model gave, if they were asked
    for: its own, and those of the likeliest tokens."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Drawer:
    """Draws the tokens of one request, one after the other."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = torch.Generator()
        seed = sampling.seed
        self._random.manual_seed(int.from_bytes(os.urandom(7), "big") if seed is None else seed)

    def draw(self, logits: Tensor) -> int:
        """Draw a token, where the temperature is not 0. Shapes: logits [V], fp32.

        One number is drawn for each token, so that what other requests draw does not matter.
        """
        share = float(torch.rand((), generator=self._random, dtype=torch.float64))
        cooled = (logits - logits.max()).double() / self.sampling.temperature
        shares, order = cooled.softmax(-1).cpu().sort(descending=True, stable=True)
        sums = shares.cumsum(-1)
        if self.sampling.top_p < 1:
            kept = max(1, int((sums - shares < self.sampling.top_p).sum()))
            sums = sums[:kept]
        place = int(torch.searchsorted(sums, share * float(sums[-1]), right=True))
        return int(order[min(place, len(sums) - 1)])


@torch.no_grad()
def draw_tokens(drawers: Sequence[Drawer | None], logits: Tensor) -> list[Token]:
    """Draw a token for each row; for a row without a drawer any token will do.

    Log-probabilities are those before the temperature. Shapes: logits [n, V].
    """
    logits = logits.float()
    ids: list[int] = logits.argmax(-1).tolist()
    for row, drawer in enumerate(drawers):
        if drawer is not None and drawer.sampling.temperature > 0:
            ids[row] = drawer.draw(logits[row])
    tokens = [Token(id) for id in ids]
    told = [
        (row, drawer.sampling.logprobs)
        for row, drawer in enumerate(drawers)
        if drawer is not None and drawer.sampling.logprobs is not None
    ]
    if not told:
        return tokens
    logprobs = logits[[row for row, _ in told]].log_softmax(-1)
    most = min(max(count for _, count in told), logits.shape[-1])
    values, indices = (part.tolist() for part in logprobs.topk(max(most, 1), dim=-1))
    for place, (row, count) in enumerate(told):
        pairs = zip(indices[place][:count], values[place][:count], strict=True)
        tokens[row] = Token(ids[row], float(logprobs[place, ids[row]]), tuple(pairs))
    return tokens
