"""The parts of a reference set that a memory is calibrated on: to fit, to choose, to judge by.

Split by example, identical ones together. A token may recall any example but its own, as a new
text's would; whatever else is split, that keeps an example from judging itself.

Knows token ids and windows; nothing of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.adapt.calibrate.config import CalibrationConfig
from knn_moe.errors import CalibrationError
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.provenance import Provenance, owners
from knn_moe.reference.windows import ReferenceTokens, TokenBatch, make_batch, plan_batches

LEAST_EXAMPLES: Final = 24
_LEAST_JUDGED: Final = 6  # that all of them gain by chance is 1 in 64


@dataclass(frozen=True)
class Reading:
    """One batch to read. Shapes: owner [B·T] int64, what each token's example is, padding's 0;
    kept [B·T] bool, whether it is a case of a memory of this reference; rows [n] int64, where that
    has those cases; example [B] int64, of each line."""

    batch: TokenBatch
    owner: Tensor
    kept: Tensor
    rows: Tensor
    example: Tensor


@dataclass(frozen=True)
class Slice:
    """Some windows of a reference set, and what each window's example is [W]."""

    reference: ReferenceTokens
    windows: list[int]
    owner: Tensor

    def readings(self, batch_tokens: int) -> Iterator[Reading]:
        for places in plan_batches(self.reference.lengths[self.windows], batch_tokens):
            numbers = [self.windows[place] for place in places]
            batch, rows = make_batch(self.reference, numbers)
            example = self.owner[numbers]
            owner = (example[:, None] * batch.real).flatten()
            kept = torch.full_like(owner, rows.kept is None, dtype=torch.bool)
            if rows.kept is not None:
                kept[rows.kept] = True
            spans = [torch.arange(span.row, span.row + span.rows) for span in rows.spans]
            yield Reading(batch, owner, kept, torch.cat([owner[:0], *spans]), example)

    def first(self, most_tokens: int) -> Slice:
        """As many of its windows as have so many tokens, but as few as there must be."""
        lengths = self.reference.lengths[self.windows]
        inside = lengths.cumsum(0) - lengths < most_tokens
        inside[:_LEAST_JUDGED] = True
        windows = [window for window, kept in zip(self.windows, inside, strict=True) if kept]
        return replace(self, windows=windows)


class Parts(NamedTuple):
    """Three slices that have no example in common; and what is not fitted, to learn from last."""

    fitting: Slice
    choosing: Slice
    judging: Slice
    held_out: Slice


def split(reference: ReferenceTokens, config: CalibrationConfig) -> Parts:
    """A share of the examples is to choose by, another to judge by, the rest to fit.

    Windows with a token that is scored, one of each example before the second of any, until
    there are as many tokens as the config says.
    """
    owner = owners(reference.provenance)
    examples = owner.unique()
    if len(examples) < LEAST_EXAMPLES:
        raise CalibrationError(
            f"A memory of {len(examples)} different examples cannot be calibrated: it takes "
            f"{LEAST_EXAMPLES}, to fit, to choose and to judge by. Add examples, or use a preset."
        )
    chance = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(len(examples), generator=chance)
    count = max(_LEAST_JUDGED, round(config.held_out * len(examples)))
    chosen, judged = (torch.isin(owner, examples[part]) for part in order.split(count)[:2])
    share = 2 * config.held_out
    in_the_end = round(config.fit_tokens * share / (1 - share))
    return Parts(
        _draw(reference, owner, ~(chosen | judged), config.fit_tokens, chance),
        _draw(reference, owner, chosen, config.judge_tokens, chance),
        _draw(reference, owner, judged, config.judge_tokens, chance),
        _draw(reference, owner, chosen | judged, in_the_end, chance),
    )


def _draw(
    reference: ReferenceTokens,
    owner: Tensor,
    wanted: Tensor,
    most_tokens: int,
    chance: torch.Generator,
) -> Slice:
    lengths = reference.lengths.tolist()
    scored = torch.tensor([bool(part.any()) for part in reference.scored.split(lengths)])
    windows = (wanted & scored).nonzero().flatten()
    windows = windows[torch.randperm(len(windows), generator=chance)]
    if len(owner[windows].unique()) < _LEAST_JUDGED:
        raise CalibrationError(
            f"Only {len(owner[windows].unique())} of the examples to calibrate on have a token to "
            f"predict: each part of them takes {_LEAST_JUDGED}. Use more or longer ones, hold out "
            f"less, or use a preset."
        )
    windows = windows[_turns(owner[windows]).argsort(stable=True)]
    return Slice(reference, windows.tolist(), owner).first(most_tokens)


def _turns(owner: Tensor) -> Tensor:
    """How often each window's example has come before. Shapes: [n] → [n] int64."""
    seen: Counter[int] = Counter()
    turns = []
    for each in owner.tolist():
        turns.append(seen[each])
        seen[each] += 1
    return torch.tensor(turns, dtype=torch.int64)


def own_reference(memory: RoutingMemory) -> ReferenceTokens:
    """The tokens a memory was built from, as it read them."""
    provenance = memory.provenance
    kept = torch.zeros(len(provenance.stream), dtype=torch.bool)
    kept[provenance.key] = True
    scored = torch.ones_like(kept) if memory.build.tokens == "all" else _completed(provenance)
    scored[provenance.begin[1:] - 1] = False  # a window's last token has no next one
    return ReferenceTokens(provenance, scored, kept)


def _completed(provenance: Provenance) -> Tensor:
    """Whether a token is in its example's completion: from the first that is a case on. Of a pruned
    memory there may be some before that, which cannot be told. Shape [S] bool."""
    stream = torch.arange(len(provenance.stream))
    example = provenance.example_of_window.long()
    first = torch.full([int(example.max()) + 1], len(stream))
    first = first.scatter_reduce(0, provenance.example, provenance.key, "amin")
    return stream >= first[example].repeat_interleave(provenance.begin.diff())
