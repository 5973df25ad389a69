"""Where each key of a memory came from: the reference tokens, the windows they were read in, each
key's place in them, and the domain, where memories of several were merged.

Knows token ids and integers; nothing of text or models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from knn_moe.errors import ConfigError

_ONE_DOMAIN: Final[Any] = None


@dataclass(frozen=True)
class Provenance:
    """Shapes, for S tokens in W windows and M keys: stream [S] int32; begin [W + 1] int64, where
    each window begins in the stream; example, offset [W] int32, the example a window was cut from
    and where in it; key [M] int64, each key's place in the stream; domain [W] int32, which of the
    merged memories a window came from, ascending: all 0 where it is left out."""

    stream: Tensor
    begin: Tensor
    example_of_window: Tensor
    offset_of_window: Tensor
    key: Tensor
    domain_of_window: Tensor = _ONE_DOMAIN

    def __post_init__(self) -> None:
        if self.domain_of_window is _ONE_DOMAIN:
            nought = torch.zeros_like(self.example_of_window)
            object.__setattr__(self, "domain_of_window", nought)

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
    def domain(self) -> Tensor:
        """The domain of each key, ascending. Shape [M] int64."""
        return self.domain_of_window[self.window].long()

    @property
    def num_domains(self) -> int:
        """How many have a window here, if not a key."""
        return int(self.domain_of_window.max()) + 1 if len(self.domain_of_window) else 1

    @property
    def cases_of_domain(self) -> list[int]:
        """How many keys each domain has."""
        if self.num_domains == 1:
            return [len(self)]
        counts: list[int] = self.domain.bincount(minlength=self.num_domains).tolist()
        return counts

    @property
    def num_examples(self) -> int:
        """How many examples have a window here."""
        return int(self.example_of_window.unique().numel())

    def example_at(self, row: int) -> int:
        """The example of key `row` alone."""
        return int(self.example_of_window[self._window_at(int(self.key[row]))])

    def _window_at(self, place: int) -> int:
        return int(torch.searchsorted(self.begin, place, right=True)) - 1

    def context(self, row: int, before: int = 16, after: int = 1) -> tuple[list[int], int]:
        """Token ids around key `row`, within its window, and the key's place among them."""
        place = int(self.key[row])
        window = self._window_at(place)
        start = max(int(self.begin[window]), place - before)
        stop = min(int(self.begin[window + 1]), place + 1 + after)
        return self.stream[start:stop].tolist(), place - start

    def tensors(self) -> dict[str, Tensor]:
        """As a file holds them: no domains, where there is one."""
        columns = dict(vars(self))
        if self.num_domains == 1:
            del columns["domain_of_window"]
        return columns

    def of_one_domain(self) -> Provenance:
        """The same, and where it was merged from is forgotten."""
        return replace(self, domain_of_window=_ONE_DOMAIN)

    def subset(self, rows: Tensor) -> Provenance:
        """The same tokens and some of their keys. Shapes: rows [n] int64, ascending."""
        return replace(self, key=self.key[rows])

    def without(self, examples: Collection[int]) -> tuple[Provenance, Tensor]:
        """No token, window or key of `examples`, the others numbered as before; and the rows of
        the keys that stay [n] int64. Domains close up where one is gone."""
        stays = self._stays(examples)
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
            domain_of_window=self.domain_of_window[stays].unique(return_inverse=True)[1].int(),
        )
        return rest, rows

    def domains_without(self, examples: Collection[int]) -> list[int]:
        """Those with a window of other examples, by their numbers here."""
        left: list[int] = self.domain_of_window[self._stays(examples)].unique().tolist()
        return left

    def _stays(self, examples: Collection[int]) -> Tensor:
        """Windows that are not of `examples`. Shape [W] bool."""
        gone = torch.tensor(sorted(examples), dtype=self.example_of_window.dtype)
        return ~torch.isin(self.example_of_window, gone)

    def prefix_hash(self) -> Tensor:
        """A 64-bit hash of all a key's router input depends on: the tokens of its window so far.

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
    """One provenance after the other; examples and domains of later parts are numbered on."""
    stream, begin, example, offset, key = [], [torch.zeros(1, dtype=torch.int64)], [], [], []
    domain, tokens, examples, domains = [], 0, 0, 0
    for part in parts:
        stream.append(part.stream)
        begin.append(part.begin[1:] + tokens)
        example.append(part.example_of_window + examples)
        offset.append(part.offset_of_window)
        key.append(part.key + tokens)
        domain.append(part.domain_of_window + domains)
        tokens += len(part.stream)
        examples += int(part.example_of_window.max()) + 1 if len(part.example_of_window) else 0
        domains += part.num_domains
    columns = (stream, begin, example, offset, key, domain)
    return Provenance(*(torch.cat(column) for column in columns))


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
    named = [names[number] for number in provenance.example_of_window.tolist()]
    return torch.tensor(named, dtype=torch.int64)


def check_droppable(provenance: Provenance, examples: Collection[int]) -> None:
    """Refuse examples that cannot go, or that would leave what they say in others."""
    known, gone = set(provenance.example_of_window.tolist()), set(examples)
    if not gone:
        raise ConfigError("No example to drop was named: give the numbers of some.")
    if gone - known:
        raise ConfigError(
            f"The memory has no example {min(gone - known)}: it has {len(known):,}, numbered "
            f"{min(known)} to {max(known)}. `explain` and the order of the reference set tell them."
        )
    if gone == known:
        raise ConfigError(
            f"All {len(known):,} examples would go, and no memory be left: delete it instead."
        )
    twins = _twins(provenance, gone)
    if twins:
        raise ConfigError(
            f"Example {twins[0]} says the same as one to drop, word for word: drop it too, or "
            f"what it says stays in the memory."
        )


def _twins(provenance: Provenance, examples: Collection[int]) -> list[int]:
    """Other examples with exactly the tokens of one of `examples`."""
    gone = torch.isin(provenance.example_of_window, torch.tensor(sorted(examples)))
    owner = owners(provenance)
    same = torch.isin(owner, owner[gone]) & ~gone
    return [int(number) for number in provenance.example_of_window[same].unique()]
