"""From examples to batches: tokens in windows, windows in batches of like length.

Holds the reference set's token ids (some 20 bytes a token), never its keys.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knn_moe.config import BuildConfig
from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, tokenise
from knn_moe.reference.provenance import Provenance

_POOL: Final = 4096  # windows sorted by length at a time


class Span(NamedTuple):
    """A run of rows: its first row in the file, its first row in what is written, how many."""

    row: int
    start: int
    rows: int


class Bounds(NamedTuple):
    """A window: where its tokens begin, how many; where its rows begin, how many."""

    start: int
    length: int
    row: int
    rows: int


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences. Shapes: ids, real, scored [B, T]; `scored`: its next token counts."""

    ids: Tensor
    real: Tensor
    scored: Tensor
    padded: bool

    def to(self, device: torch.device) -> TokenBatch:
        ids, real, scored = (part.to(device) for part in (self.ids, self.real, self.scored))
        return TokenBatch(ids, real, scored, self.padded)


@dataclass(frozen=True)
class ReferenceTokens:
    """The reference set as windows of tokens. Shapes: scored, kept [S] bool.

    `scored`: the next token counts in the loss. `kept`: the token becomes a case of the memory.
    """

    provenance: Provenance
    scored: Tensor
    kept: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.provenance.begin.diff()

    @cached_property
    def bounds(self) -> list[Bounds]:
        """Each window's tokens in the stream and rows in the memory."""
        begin = self.provenance.begin
        rows = torch.cat([torch.zeros(1, dtype=torch.int64), self.kept.cumsum(0)])[begin]
        columns = (begin[:-1], begin.diff(), rows[:-1], rows.diff())
        return [Bounds(*row) for row in torch.stack(columns, dim=1).tolist()]


def read_tokens(
    examples: Iterable[Example], tokenizer: Any, config: BuildConfig, max_length: int
) -> ReferenceTokens:
    """Tokenise every example and cut it into windows of at most `max_length` tokens."""
    stream, scored = array.array("i"), array.array("b")
    begin, owner, offset = array.array("q", [0]), array.array("i"), array.array("i")
    for number, example in enumerate(examples):
        tokens = tokenise(example, tokenizer)
        first = tokens.completion_start if config.tokens == "completion" else 0
        for start in range(0, len(tokens.ids), max_length):
            window = tokens.ids[start : start + max_length]
            stream.extend(window)
            targets = range(start + 1, start + len(window))
            scored.extend([*(target >= first for target in targets), False])
            begin.append(len(stream))
            owner.append(number)
            offset.append(start)
    if not stream:
        raise ReferenceSetError("The reference set holds no tokens.")
    counts = torch.from_numpy(np.array(scored, dtype=bool))
    kept = counts if config.tokens == "completion" else torch.ones_like(counts)
    if not bool(kept.any()):
        raise ReferenceSetError(
            "tokens='completion' leaves nothing to keep: no example has a completion after its "
            "first token. Use tokens='all', or examples with prompt and completion."
        )
    provenance = Provenance(
        stream=_tensor(stream, np.int32),
        begin=_tensor(begin, np.int64),
        example_of_window=_tensor(owner, np.int32),
        offset_of_window=_tensor(offset, np.int32),
        key=kept.nonzero().flatten(),
    )
    return ReferenceTokens(provenance, counts, kept)


def _tensor(values: array.array[int], dtype: type[np.signedinteger[Any]]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))


def plan_batches(lengths: Tensor, batch_tokens: int) -> Iterator[list[int]]:
    """Windows of like length together, so that padding is little and each batch is full.

    Longest first within a pool: a batch that does not fit in memory fails early. A window longer
    than `batch_tokens` is a batch of its own.
    """
    for start in range(0, len(lengths), _POOL):
        pool = lengths[start : start + _POOL]
        batch: list[int] = []
        for place in torch.argsort(pool, descending=True, stable=True).tolist():
            if batch and (len(batch) + 1) * int(lengths[batch[0]]) > batch_tokens:
                yield batch
                batch = []
            batch.append(start + place)
        yield batch


@dataclass(frozen=True)
class Rows:
    """Which rows of the memory a batch fills: the `kept` of its B·T tokens (None: all), as places
    [n] int64, and runs of them as (first row in the memory, first among the kept, how many)."""

    kept: Tensor | None
    spans: list[Span]


def make_batch(reference: ReferenceTokens, windows: list[int]) -> tuple[TokenBatch, Rows]:
    """The tokens of `windows`, right-padded, and the rows their cases will fill."""
    longest = max(reference.bounds[window].length for window in windows)
    ids = torch.zeros(len(windows), longest, dtype=torch.int64)
    real, scored, kept = (torch.zeros(len(windows), longest, dtype=torch.bool) for _ in range(3))
    for line, window in enumerate(windows):
        start, length, *_ = reference.bounds[window]
        part = slice(start, start + length)
        ids[line, :length] = reference.provenance.stream[part]
        real[line, :length] = True
        scored[line, :length] = reference.scored[part]
        kept[line, :length] = reference.kept[part]
    places = None if bool(kept.all()) else kept.flatten().nonzero().flatten()
    batch = TokenBatch(ids, real, scored, not bool(real.all()))
    return batch, Rows(places, _spans([reference.bounds[window] for window in windows]))


def _spans(bounds: list[Bounds]) -> list[Span]:
    """Where each window's rows go; those that follow one another in the memory are one run."""
    spans: list[Span] = []
    filled = 0
    for bound in bounds:
        if spans and spans[-1].row + spans[-1].rows == bound.row:
            spans[-1] = spans[-1]._replace(rows=spans[-1].rows + bound.rows)
        elif bound.rows:
            spans.append(Span(bound.row, filled, bound.rows))
        filled += bound.rows
    return spans
