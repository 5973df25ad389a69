"""The parts of a reference set that a memory is calibrated on: one to fit, one to judge.

Split by example, identical ones together. A token may recall any example but its own, as a new
text's would; whatever else is split, that keeps an example from judging itself.

Knows token ids and windows; nothing of models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from knn_moe.batches import ReferenceTokens, make_batch, plan_batches
from knn_moe.errors import CalibrationError
from knn_moe.memory import RoutingMemory
from knn_moe.optimise import TokenBatch
from knn_moe.provenance import Provenance

LEAST_EXAMPLES: Final = 8


@dataclass(frozen=True)
class Reading:
    """One batch to read. Shapes: owner [B·T] int64, what each token's example is, padding's 0;
    example [B] int64, of each line."""

    batch: TokenBatch
    owner: Tensor
    example: Tensor


@dataclass(frozen=True)
class Slice:
    """Some windows of a reference set, and what each window's example is [W]."""

    reference: ReferenceTokens
    windows: list[int]
    owner: Tensor

    @property
    def tokens(self) -> int:
        return int(self.reference.lengths[self.windows].sum())

    @property
    def examples(self) -> int:
        return len(self.owner[self.windows].unique())

    def readings(self, batch_tokens: int) -> Iterator[Reading]:
        for places in plan_batches(self.reference.lengths[self.windows], batch_tokens):
            numbers = [self.windows[place] for place in places]
            batch, _ = make_batch(self.reference, numbers)
            example = self.owner[numbers]
            owner = (example[:, None] * batch.real).flatten()
            yield Reading(batch, owner, example)


def split(
    reference: ReferenceTokens, share: float, most_tokens: int, seed: int
) -> tuple[Slice, Slice]:
    """A slice to fit and one to judge by, the latter of `share` of the examples; windows drawn
    until they have `most_tokens` each. Only windows with a token that is scored."""
    owner = owners(reference.provenance)
    examples = owner.unique()
    if len(examples) < LEAST_EXAMPLES:
        raise CalibrationError(
            f"A memory of {len(examples)} different examples cannot be calibrated: it takes "
            f"{LEAST_EXAMPLES}, some to fit and others to judge by. Add examples, or use a preset."
        )
    chance = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(examples), generator=chance)
    held = examples[order[: max(2, round(share * len(examples)))]]
    judged = torch.isin(owner, held)
    return (
        _draw(reference, owner, ~judged, most_tokens, chance),
        _draw(reference, owner, judged, most_tokens, chance),
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
    if not len(windows):
        raise CalibrationError(
            "None of the examples that a calibration would be judged by has a token to predict: "
            "use longer ones, or a preset."
        )
    windows = windows[torch.randperm(len(windows), generator=chance)]
    before = reference.lengths[windows].cumsum(0) - reference.lengths[windows]
    return Slice(reference, windows[before < most_tokens].tolist(), owner)


def owners(provenance: Provenance) -> Tensor:
    """The example of each window, by what it says: the same for identical examples, of whatever
    reference set. Shape [W] int64, not 0."""
    parts = provenance.stream.split(provenance.begin.diff().tolist())
    digests: dict[int, hashlib.blake2b] = {}
    for number, tokens in zip(provenance.example_of_window.tolist(), parts, strict=True):
        digest = digests.setdefault(number, hashlib.blake2b(digest_size=8))
        digest.update(tokens.numpy().tobytes())
    names = {
        number: int.from_bytes(digest.digest(), "big", signed=True) or 1
        for number, digest in digests.items()
    }
    return torch.tensor([names[number] for number in provenance.example_of_window.tolist()])


def own_reference(memory: RoutingMemory) -> ReferenceTokens:
    """The tokens a memory was built from, as it read them."""
    provenance = memory.provenance
    kept = torch.zeros(len(provenance.stream), dtype=torch.bool)
    kept[provenance.key] = True
    scored = kept.clone()
    if memory.build.tokens == "all":
        scored[:] = True
        scored[provenance.begin[1:] - 1] = False
    return ReferenceTokens(provenance, scored, kept)
