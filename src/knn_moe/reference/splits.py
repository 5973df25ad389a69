"""The parts of a reference set that a memory learns from: to fit, to choose and to judge by.

Split by example, identical examples together. Within a part a token may recall any example but its
own, as the tokens of a new text would.

Knows token ids and windows; nothing of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.config import LEAST_EXAMPLES, HeldOutConfig
from knn_moe.errors import CalibrationError
from knn_moe.reference.windows import Batch, ReferenceTokens

_LEAST_JUDGED: Final = 6  # that all of six examples gain by chance has a probability of 1 in 64


@dataclass(frozen=True)
class Part:
    """Some windows of a reference set."""

    reference: ReferenceTokens
    windows: list[int]

    @property
    def tokens(self) -> int:
        """The number of tokens that are read."""
        return int(self.reference.sizes[self.windows].sum())

    def batches(self, batch_tokens: int) -> Iterator[Batch]:
        """Yield the windows in batches of at most `batch_tokens` tokens."""
        return self.reference.batches(batch_tokens, self.windows)

    def first(self, most_tokens: int) -> Part:
        """Keep windows from the front: `most_tokens` tokens, but at least six windows."""
        lengths = self.reference.lengths[self.windows]
        inside = lengths.cumsum(0) - lengths < most_tokens
        inside[:_LEAST_JUDGED] = True
        windows = [window for window, kept in zip(self.windows, inside, strict=True) if kept]
        return replace(self, windows=windows)

    def halves(self) -> tuple[Part, Part]:
        """Split the windows in two; those of one example stay together."""
        _, place = self.reference.owners[self.windows].unique(return_inverse=True)
        first, second = (
            [window for window, at in zip(self.windows, place.tolist(), strict=True) if at % 2 == n]
            for n in (0, 1)
        )
        return replace(self, windows=first), replace(self, windows=second)

    def without(self, other: Part) -> Part:
        """Leave out the windows of examples that `other` has, of this or another reference set."""
        seen = torch.isin(
            self.reference.owners[self.windows], other.reference.owners[other.windows]
        )
        windows = [each for each, out in zip(self.windows, seen.tolist(), strict=True) if not out]
        return replace(self, windows=windows)


class Splits(NamedTuple):
    """Three parts that have no example in common, the second and third of them together, and the
    first as it is judged, which may have other scored tokens than it is fitted on."""

    fit: Part
    choose: Part
    judge: Part
    held_out: Part
    judged_fit: Part


def split(reference: ReferenceTokens, config: HeldOutConfig) -> Splits:
    """Hold out a share of the examples to choose by, another to judge by, and fit on the rest.

    A part takes windows that have a scored token, one of each example before the second of any,
    up to the number of tokens in the config.

    Raises:
        CalibrationError: There are too few examples.
    """
    owner = reference.owners
    examples = owner.unique()
    if len(examples) < LEAST_EXAMPLES:
        raise CalibrationError(
            f"{LEAST_EXAMPLES} different examples are needed to fit, choose and judge by; there "
            f"are {len(examples)}. Add examples, or use the paper's settings: knn-moe build "
            f"without --calibrate or --distil, or build_memory in Python."
        )
    generator = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(len(examples), generator=generator)
    count = max(_LEAST_JUDGED, round(config.held_out * len(examples)))
    choose, judge = (torch.isin(owner, examples[part]) for part in order.split(count)[:2])
    share = 2 * config.held_out
    held_out_tokens = round(config.fit_tokens * share / (1 - share))
    fit = _draw(reference, ~(choose | judge), config.fit_tokens, generator)
    return Splits(
        fit,
        _draw(reference, choose, config.judge_tokens, generator),
        _draw(reference, judge, config.judge_tokens, generator),
        _draw(reference, choose | judge, held_out_tokens, generator),
        judged_fit=fit,
    )


def _draw(
    reference: ReferenceTokens, wanted: Tensor, most_tokens: int, generator: torch.Generator
) -> Part:
    """Draw windows at random. Shapes: wanted [W] bool."""
    lengths = reference.lengths.tolist()
    scored = torch.tensor([bool(part.any()) for part in reference.scored.split(lengths)])
    windows = (wanted & scored).nonzero().flatten()
    windows = windows[torch.randperm(len(windows), generator=generator)]
    owner = reference.owners[windows]
    if len(owner.unique()) < _LEAST_JUDGED:
        raise CalibrationError(
            f"Each part of the reference set needs {_LEAST_JUDGED} examples with a token to "
            f"predict, and one has {len(owner.unique())}. Use more or longer examples, hold out "
            f"less, or use the paper's settings: knn-moe build without --calibrate or --distil."
        )
    windows = windows[_count_earlier(owner).argsort(stable=True)]
    return Part(reference, windows.tolist()).first(most_tokens)


def _count_earlier(owner: Tensor) -> Tensor:
    """Count how often each entry has come before. Shapes: [n] → [n] int64."""
    seen: Counter[int] = Counter()
    earlier = []
    for each in owner.tolist():
        earlier.append(seen[each])
        seen[each] += 1
    return torch.tensor(earlier, dtype=torch.int64)
