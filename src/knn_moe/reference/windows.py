"""From examples to batches: tokens in windows, windows of like length in batches.

Holds the reference set's token ids (some 20 bytes a token), never its keys.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from knn_moe.config import BuildConfig
from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, tokenise
from knn_moe.reference.provenance import Provenance, owners
from knn_moe.support.given import describe

_POOL: Final = 4096  # windows sorted by length at a time


class Span(NamedTuple):
    """A run of rows: its first row in a file, its first row in what is written, its length."""

    row: int
    start: int
    rows: int


class Bounds(NamedTuple):
    """Where a window's tokens begin in the stream and how many there are; likewise its rows."""

    start: int
    length: int
    row: int
    rows: int


@dataclass(frozen=True)
class ReferenceTokens:
    """The reference set as windows of tokens.

    Shapes: scored [S] bool, whether the next token counts in the loss; kept [S] bool, whether the
    token becomes a case of the memory.
    """

    provenance: Provenance
    scored: Tensor
    kept: Tensor

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each window. Shape [W] int64."""
        return self.provenance.begin.diff()

    @property
    def sizes(self) -> Tensor:
        """The number of tokens that each window adds to a batch. Shape [W] int64."""
        return self.lengths

    @cached_property
    def owners(self) -> Tensor:
        """A hash of each window's example, never 0. Shape [W] int64."""
        return owners(self.provenance)

    @cached_property
    def bounds(self) -> list[Bounds]:
        """Each window's tokens in the stream and rows in the memory."""
        begin = self.provenance.begin
        rows = torch.cat([torch.zeros(1, dtype=torch.int64), self.kept.cumsum(0)])[begin]
        columns = (begin[:-1], begin.diff(), rows[:-1], rows.diff())
        return [Bounds(*row) for row in torch.stack(columns, dim=1).tolist()]

    def batches(self, batch_tokens: int, windows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield batches of at most `batch_tokens` tokens, of all windows or of some."""
        numbers = range(len(self.lengths)) if windows is None else windows
        for places in plan_batches(self.lengths[list(numbers)], batch_tokens):
            yield self.batch([numbers[place] for place in places])

    def batch(self, windows: list[int]) -> Batch:
        """Return some windows as one batch."""
        return make_batch(self, windows)


def read_tokens(
    examples: Iterable[Example], tokenizer: Any, config: BuildConfig, max_length: int
) -> ReferenceTokens:
    """Tokenise every example and cut it into windows of at most `max_length` tokens.

    Raises:
        ReferenceSetError: There are no tokens, or none that `config.tokens` keeps; or there is no
            tokenizer.
    """
    if not callable(tokenizer):
        raise ReferenceSetError(
            f"The model's tokenizer is needed to read examples, and {describe(tokenizer)} is none."
        )
    stream, completed = array.array("i"), array.array("b")
    begin, owner, offset = array.array("q", [0]), array.array("i"), array.array("i")
    for number, example in enumerate(examples):
        tokens = tokenise(example, tokenizer)
        first = tokens.completion_start
        for start in range(0, len(tokens.ids), max_length):
            window = tokens.ids[start : start + max_length]
            stream.extend(window)
            targets = range(start + 1, start + len(window))
            completed.extend([*(target >= first for target in targets), False])
            begin.append(len(stream))
            owner.append(number)
            offset.append(start)
    if not stream:
        raise ReferenceSetError("The reference set holds no tokens.")
    followed = torch.ones(len(stream), dtype=torch.bool)
    followed[torch.tensor(begin[1:]) - 1] = False  # a window's last token has no next one
    in_completion = torch.from_numpy(np.array(completed, dtype=bool))
    scored = in_completion if (config.loss or config.tokens) == "completion" else followed
    kept = in_completion if config.tokens == "completion" else torch.ones_like(followed)
    if "completion" in (config.tokens, config.loss) and not bool(in_completion.any()):
        raise ReferenceSetError(
            "There is no completion to learn from: no example has one after its first token. Use "
            "all tokens, or examples with prompt and completion."
        )
    provenance = Provenance(
        stream=_tensor(stream, np.int32),
        begin=_tensor(begin, np.int64),
        example_of_window=_tensor(owner, np.int32),
        offset_of_window=_tensor(offset, np.int32),
        key=kept.nonzero().flatten(),
    )
    return ReferenceTokens(provenance, scored, kept)


def _tensor(values: array.array[int], dtype: type[np.signedinteger[Any]]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))


def plan_batches(lengths: Tensor, batch_tokens: int) -> Iterator[list[int]]:
    """Group windows of like length, so that padding is little and each batch is full.

    The longest come first within a pool: a batch that does not fit in memory fails early. A window
    longer than `batch_tokens` is a batch of its own. Shapes: lengths [W] int64.
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
class Batch:
    """Windows of the reference set, right-padded, and the rows of a memory that they fill.

    Shapes: ids [B, T] int64; real, scored, kept [B, T] bool, see ReferenceTokens; owner [B] int64,
    a hash of each line's example. Spans tell where the kept tokens' cases lie in the memory.
    """

    ids: Tensor
    real: Tensor
    scored: Tensor
    kept: Tensor
    owner: Tensor
    spans: list[Span]
    padded: bool

    def to(self, device: torch.device) -> Self:
        """Move what a forward pass needs to `device`."""
        ids, real, scored = (part.to(device) for part in (self.ids, self.real, self.scored))
        return replace(self, ids=ids, real=real, scored=scored)

    @property
    def counts(self) -> Tensor:
        """How much each line counts in a mean loss: its scored tokens. Shape [B] int64."""
        return self.scored.sum(dim=1)

    @property
    def attention_mask(self) -> Tensor | None:
        """The mask to call a model with; None without padding: attention's fastest path."""
        return self.real.long() if self.padded else None

    @property
    def token_owner(self) -> Tensor:
        """The owner of each token, 0 for padding. Shape [B·T] int64."""
        return (self.owner[:, None] * self.real).flatten()

    @property
    def first_tokens(self) -> Tensor:
        """Whether a token is the first of its line. Shape [B·T] bool."""
        first = torch.zeros_like(self.real)
        first[:, 0] = True
        return first.flatten()

    @cached_property
    def kept_places(self) -> Tensor | None:
        """The places of the kept tokens among all B·T. Shape [n] int64; None: all are kept."""
        return None if bool(self.kept.all()) else self.kept.flatten().nonzero().flatten()


def make_batch(reference: ReferenceTokens, windows: list[int]) -> Batch:
    """Return the tokens of `windows`, right-padded, with the rows their cases fill."""
    bounds = [reference.bounds[window] for window in windows]
    shape = len(windows), max(bound.length for bound in bounds)
    ids = torch.zeros(shape, dtype=torch.int64)
    real, scored, kept = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
    for line, (start, length, *_) in enumerate(bounds):
        part = slice(start, start + length)
        ids[line, :length] = reference.provenance.stream[part]
        real[line, :length] = True
        scored[line, :length] = reference.scored[part]
        kept[line, :length] = reference.kept[part]
    owner = reference.owners[windows]
    return Batch(ids, real, scored, kept, owner, _join_spans(bounds), not bool(real.all()))


def _join_spans(bounds: list[Bounds]) -> list[Span]:
    """Return where each window's rows go; rows that follow one another are one span."""
    spans: list[Span] = []
    filled = 0
    for bound in bounds:
        if spans and spans[-1].row + spans[-1].rows == bound.row:
            spans[-1] = spans[-1]._replace(rows=spans[-1].rows + bound.rows)
        elif bound.rows:
            spans.append(Span(bound.row, filled, bound.rows))
        filled += bound.rows
    return spans
