"""Where each key of a memory came from: the reference tokens, the windows they were read in, and
each key's place in them.

Knows token ids and integers; nothing of text or models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knn_moe.errors import ConfigError


@dataclass(frozen=True)
class Provenance:
    """The reference tokens, and where in them each key was read.

    Shapes, for S tokens in W windows and M keys: stream [S] int32; begin [W + 1] int64, where each
    window begins in the stream; example_of_window, offset_of_window [W] int32, the example a window
    was cut from and where in it; key [M] int64, each key's place in the stream.
    """

    stream: Tensor
    begin: Tensor
    example_of_window: Tensor
    offset_of_window: Tensor
    key: Tensor

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Provenance:
        """Read the columns of a file. Format 4 could have one more, which is left out."""
        return cls(**{field.name: tensors[field.name] for field in fields(cls)})

    def __len__(self) -> int:
        return len(self.key)

    @property
    def window(self) -> Tensor:
        """The window of each key. Shape [M] int64."""
        return torch.searchsorted(self.begin, self.key, right=True) - 1

    @property
    def example(self) -> Tensor:
        """The example of each key, as a number in the order given. Shape [M] int64."""
        return self.example_of_window[self.window].long()

    @property
    def in_completion(self) -> Tensor:
        """Whether a token is in its example's completion: from the first that is a case on.

        A pruned memory may have lost the first ones, which cannot be told. Shape [S] bool.
        """
        stream = torch.arange(len(self.stream))
        names, example = self.example_of_window.unique(return_inverse=True)
        first = torch.full([len(names)], len(stream))
        first = first.scatter_reduce(0, example[self.window], self.key, "amin")
        return stream >= first[example].repeat_interleave(self.begin.diff())

    @property
    def position(self) -> Tensor:
        """The key's token position in its example. Shape [M] int64."""
        window = self.window
        return self.key - self.begin[window] + self.offset_of_window[window]

    @property
    def token(self) -> Tensor:
        """The token the key was read at. Shape [M] int64."""
        return self.stream[self.key].long()

    @property
    def following(self) -> Tensor:
        """The token after the key's, -1 where its window ends. Shape [M] int64."""
        last = self.begin[self.window + 1] - 1
        after = self.stream[(self.key + 1).clamp(max=len(self.stream) - 1)].long()
        return after.masked_fill(self.key >= last, -1)

    @property
    def num_examples(self) -> int:
        """The number of examples that have a window."""
        return int(self.example_of_window.unique().numel())

    def example_at(self, row: int) -> int:
        """Return the example of key `row`."""
        return int(self.example_of_window[self._window_at(int(self.key[row]))])

    def _window_at(self, place: int) -> int:
        return int(torch.searchsorted(self.begin, place, right=True)) - 1

    def context(self, row: int, before: int = 16, after: int = 1) -> tuple[list[int], int]:
        """Return token ids around key `row`, within its window, and the key's place among them."""
        place = int(self.key[row])
        window = self._window_at(place)
        start = max(int(self.begin[window]), place - before)
        stop = min(int(self.begin[window + 1]), place + 1 + after)
        return self.stream[start:stop].tolist(), place - start

    def tensors(self) -> dict[str, Tensor]:
        """Return the columns by name, as a file holds them."""
        return dict(vars(self))

    def subset(self, rows: Tensor) -> Provenance:
        """Keep all tokens and the keys of `rows`. Shapes: rows [n] int64, ascending."""
        return replace(self, key=self.key[rows])

    def without(self, examples: Collection[int]) -> tuple[Provenance, Tensor]:
        """Leave `examples` out: their tokens, windows and keys. The others keep their numbers.

        Returns:
            The rest, and the rows of the keys that stay [n] int64.
        """
        gone = torch.tensor(sorted(examples), dtype=self.example_of_window.dtype)
        stays = ~torch.isin(self.example_of_window, gone)
        lengths = self.begin.diff()
        token = stays.repeat_interleave(lengths)
        rows = token[self.key].nonzero().flatten()
        place = token.cumsum(0) - 1
        rest = Provenance(
            stream=self.stream[token],
            begin=torch.cat([self.begin[:1], lengths[stays].cumsum(0)]),
            example_of_window=self.example_of_window[stays],
            offset_of_window=self.offset_of_window[stays],
            key=place[self.key[rows]],
        )
        return rest, rows

    def prefix_hash(self) -> Tensor:
        """Return a hash of all that a key's router input depends on: its window's tokens so far.

        Keys with equal hashes are one case read twice; templates make many. Shape [M] int64.
        """
        tokens = self.stream.numpy().astype(np.uint64) + np.uint64(1)
        begin = self.begin.numpy()
        place = np.arange(len(tokens)) - np.repeat(begin[:-1], np.diff(begin))
        with np.errstate(over="ignore"):
            sums = np.cumsum(_scramble(tokens ^ _scramble(place.astype(np.uint64))))
            before = np.concatenate([[np.uint64(0)], sums])[begin[:-1]]
            hashes = sums - np.repeat(before, np.diff(begin))
        return torch.from_numpy(hashes[self.key.numpy()].view(np.int64))


def _scramble(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """SplitMix64's finaliser: every bit of the input reaches every bit of the output."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def concatenate(parts: list[Provenance]) -> Provenance:
    """Put one provenance after the other; the examples of later parts are numbered on."""
    stream, begin, example, offset, key = [], [torch.zeros(1, dtype=torch.int64)], [], [], []
    tokens = examples = 0
    for part in parts:
        stream.append(part.stream)
        begin.append(part.begin[1:] + tokens)
        example.append(part.example_of_window + examples)
        offset.append(part.offset_of_window)
        key.append(part.key + tokens)
        tokens += len(part.stream)
        examples += int(part.example_of_window.max()) + 1 if len(part.example_of_window) else 0
    return Provenance(*(torch.cat(column) for column in (stream, begin, example, offset, key)))


def same_places(first: Provenance, second: Provenance) -> bool:
    """Tell whether both are of the same tokens, in the same windows and with the same keys."""
    mine, theirs = first.tensors(), second.tensors()
    return all(torch.equal(mine[name].long(), theirs[name].long()) for name in mine)


def owners(provenance: Provenance) -> Tensor:
    """Return a hash of each window's example: equal for identical examples, also of two reference
    sets. Shape [W] int64, never 0."""
    parts = provenance.stream.split(provenance.begin.diff().tolist())
    digests: dict[int, hashlib.blake2b] = {}
    for number, tokens in zip(provenance.example_of_window.tolist(), parts, strict=True):
        digest = digests.setdefault(number, hashlib.blake2b(digest_size=8))
        digest.update(tokens.numpy().tobytes())
    names = {
        number: int.from_bytes(digest.digest(), "big", signed=True) or 1
        for number, digest in digests.items()
    }
    named = [names[number] for number in provenance.example_of_window.tolist()]
    return torch.tensor(named, dtype=torch.int64)


def check_droppable(provenance: Provenance, examples: Collection[int]) -> None:
    """Raise ConfigError if examples cannot be dropped, or others repeat their text."""
    known, gone = set(provenance.example_of_window.tolist()), set(examples)
    if not gone:
        raise ConfigError("No example to drop was named. Give the numbers of some.")
    if gone - known:
        raise ConfigError(
            f"The memory has no example {min(gone - known)}: it has {len(known):,}, numbered "
            f"{min(known)} to {max(known)}, in the order of the reference set."
        )
    if gone == known:
        raise ConfigError(
            f"Dropping all {len(known):,} examples would leave an empty memory. Delete it instead."
        )
    twins = _find_twins(provenance, gone)
    if twins:
        raise ConfigError(
            f"Example {twins[0]} has the same text as one to drop, so the text would stay in the "
            f"memory. Drop it too."
        )


def _find_twins(provenance: Provenance, examples: Collection[int]) -> list[int]:
    """Return other examples that have exactly the tokens of one of `examples`."""
    gone = torch.isin(provenance.example_of_window, torch.tensor(sorted(examples)))
    owner = owners(provenance)
    same = torch.isin(owner, owner[gone]) & ~gone
    return [int(number) for number in provenance.example_of_window[same].unique()]
