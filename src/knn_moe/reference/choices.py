"""Questions with wrong answers: each window of a reference set beside the wrong completions of its
prompt, read in one batch.

Only right answers become cases. A wrong answer is a line of a batch like any other, and belongs to
the same example: its tokens recall everything but that example.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, tokenise
from knn_moe.reference.windows import Batch, ReferenceTokens, make_batch, plan_batches


def count_characters(continuation: str) -> int:
    """Return the length by which an answer's log-likelihood is divided: a plain sum would favour
    short answers."""
    return max(len(continuation.removeprefix(" ")), 1)


class Line(NamedTuple):
    """A wrong answer after its prompt: token ids, the place of the answer's first token, and the
    answer's characters."""

    ids: list[int]
    completion_start: int
    characters: int


@dataclass(frozen=True)
class ChoiceBatch(Batch):
    """A batch that holds all choices of each of its questions.

    Shapes: lines [Q, C] int64, the lines of each question's choices, the right one first and -1
    where there are fewer than C; weight [B] fp32, what the log-likelihood of each line is
    multiplied by: the mean number of characters of its question's choices over its own, over the
    temperature.
    """

    lines: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> Self:
        moved = super().to(device)
        return replace(moved, lines=self.lines.to(device), weight=self.weight.to(device))

    @property
    def counts(self) -> Tensor:
        """How much each line counts in a mean loss: the right one of a question counts once."""
        counts = torch.zeros(len(self.ids), dtype=torch.int64, device=self.lines.device)
        counts[self.lines[:, 0]] = 1
        return counts


@dataclass(frozen=True)
class ChoiceTokens(ReferenceTokens):
    """A reference set whose windows are questions with their right answers.

    `distractors` and `characters` (of the right answer) are of each window.
    """

    distractors: Sequence[Sequence[Line]]
    characters: Sequence[int]
    temperature: float = 1.0

    @property
    def digest(self) -> str:
        """A hash of all distractors."""
        text = json.dumps([[line.ids for line in lines] for lines in self.distractors])
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def sizes(self) -> Tensor:
        """The number of tokens that each question adds to a batch, padding included."""
        return torch.tensor(
            [
                max([length, *(len(line.ids) for line in lines)]) * (1 + len(lines))
                for length, lines in zip(self.lengths.tolist(), self.distractors, strict=True)
            ]
        )

    def batches(self, batch_tokens: int, windows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield batches of whole questions, of at most `batch_tokens` tokens."""
        numbers = range(len(self.lengths)) if windows is None else windows
        for places in plan_batches(self.sizes[list(numbers)], batch_tokens):
            yield self.batch([numbers[place] for place in places])

    def batch(self, windows: list[int]) -> ChoiceBatch:
        """Return some questions as one batch."""
        right = make_batch(self, windows)
        wrong = [(place, line) for place, w in enumerate(windows) for line in self.distractors[w]]
        longest = max([right.ids.shape[1], *(len(line.ids) for _, line in wrong)])
        shape = len(windows) + len(wrong), longest
        columns = {
            name: torch.zeros(shape, dtype=torch.bool) for name in ("real", "scored", "kept")
        }
        columns["ids"] = torch.zeros(shape, dtype=torch.int64)
        for name, column in columns.items():
            column[: len(windows), : right.ids.shape[1]] = getattr(right, name)
        most = 1 + max(len(self.distractors[window]) for window in windows)
        lines = torch.full((len(windows), most), -1)
        lines[:, 0] = torch.arange(len(windows))
        filled = [1] * len(windows)
        characters = [self.characters[window] for window in windows]
        for row, (place, (ids, start, length)) in enumerate(wrong, start=len(windows)):
            columns["ids"][row, : len(ids)] = torch.tensor(ids)
            columns["real"][row, : len(ids)] = True
            columns["scored"][row, max(start - 1, 0) : len(ids) - 1] = True
            lines[place, filled[place]] = row
            filled[place] += 1
            characters.append(length)
        asked = torch.tensor([*range(len(windows)), *(place for place, _ in wrong)])
        sizes = torch.tensor(characters, dtype=torch.float32)
        means = torch.zeros(len(windows)).index_add(0, asked, sizes) / torch.tensor(filled)
        others = {each.name: getattr(right, each.name) for each in fields(Batch)} | columns
        others["owner"], others["padded"] = right.owner[asked], not bool(columns["real"].all())
        return ChoiceBatch(**others, lines=lines, weight=means[asked] / sizes / self.temperature)


def add_distractors(
    reference: ReferenceTokens, examples: Sequence[Example], tokenizer: Any, max_length: int
) -> ReferenceTokens:
    """Put the distractors of `examples` beside their windows, if they have some.

    Raises:
        ReferenceSetError: Some examples have none, or a question with an answer is too long.
    """
    without = next((n for n, example in enumerate(examples) if not example.distractors), None)
    if not any(example.distractors for example in examples):
        return reference
    if without is not None:
        raise ReferenceSetError(
            f"Example {without} has no distractors, but others have some. Give them to all "
            f"examples, or to none."
        )
    if len(reference.lengths) != len(examples):
        long = int(reference.provenance.example_of_window.bincount().argmax())
        raise _too_long(long, max_length)
    found = []
    for number, example in enumerate(examples):
        lines = []
        for text in example.distractors:
            tokens = tokenise(Example(example.prompt, text), tokenizer)
            if len(tokens.ids) > max_length:
                raise _too_long(number, max_length)
            lines.append(Line(tokens.ids, tokens.completion_start, count_characters(text)))
        found.append(lines)
    return ChoiceTokens(
        reference.provenance,
        reference.scored,
        reference.kept,
        distractors=found,
        characters=[count_characters(example.completion) for example in examples],
    )


def _too_long(number: int, max_length: int) -> ReferenceSetError:
    return ReferenceSetError(
        f"Example {number} has more than {max_length:,} tokens, so it cannot be read beside its "
        f"distractors. Shorten it, raise max_length, or leave all distractors out."
    )
