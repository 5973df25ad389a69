"""From examples to batches: tokens in windows, windows in batches of like length.

Holds the reference set's token ids (some 20 bytes a token), never its keys.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from knn_moe.config import BuildConfig
from knn_moe.errors import ReferenceSetError
from knn_moe.optimise import TokenBatch
from knn_moe.provenance import Provenance
from knn_moe.reference import Example, tokenise

_POOL: Final = 4096  # windows sorted by length at a time


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
    """Which rows of the memory a batch fills: `kept` [B·T] bool, and runs of them as
    (first row in the memory, first among the kept, how many)."""

    kept: Tensor
    spans: list[tuple[int, int, int]]

    @property
    def all_kept(self) -> bool:
        return sum(count for _, _, count in self.spans) == len(self.kept)


def make_batch(reference: ReferenceTokens, windows: list[int]) -> tuple[TokenBatch, Rows]:
    """The tokens of `windows`, right-padded, and the rows their cases will fill."""
    begin = reference.provenance.begin
    longest = max(int(begin[window + 1] - begin[window]) for window in windows)
    ids = torch.zeros(len(windows), longest, dtype=torch.int64)
    real, scored, kept = (torch.zeros(len(windows), longest, dtype=torch.bool) for _ in range(3))
    spans: list[tuple[int, int, int]] = []
    filled = 0
    for line, window in enumerate(windows):
        part = slice(int(begin[window]), int(begin[window + 1]))
        length = part.stop - part.start
        ids[line, :length] = reference.provenance.stream[part]
        real[line, :length] = True
        scored[line, :length] = reference.scored[part]
        kept[line, :length] = reference.kept[part]
        count = int(reference.kept[part].sum())
        row = int(torch.searchsorted(reference.provenance.key, part.start))
        if spans and sum(spans[-1][::2]) == row:
            first, place, so_far = spans.pop()
            spans.append((first, place, so_far + count))
        elif count:
            spans.append((row, filled, count))
        filled += count
    return TokenBatch(ids, real, scored, not bool(real.all())), Rows(kept.flatten(), spans)
