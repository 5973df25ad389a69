"""Where keys came from, against Python lists of windows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from knn_moe.reference.provenance import Provenance, concatenate


@dataclass(frozen=True)
class Window:
    tokens: Sequence[int]
    example: int = 0
    offset: int = 0


def provenance_of(
    windows: Sequence[Window], keep: Callable[[int], bool] = lambda place: True
) -> Provenance:
    """Every token of the stream whose place `keep` accepts is a key."""
    stream = [token for window in windows for token in window.tokens]
    lengths = torch.tensor([0, *(len(window.tokens) for window in windows)])
    return Provenance(
        stream=torch.tensor(stream, dtype=torch.int32),
        begin=lengths.cumsum(0),
        example_of_window=torch.tensor([w.example for w in windows], dtype=torch.int32),
        offset_of_window=torch.tensor([w.offset for w in windows], dtype=torch.int32),
        key=torch.tensor([place for place in range(len(stream)) if keep(place)]),
    )


def random_windows(count: int, vocabulary: int, longest: int, seed: int = 0) -> list[Window]:
    draw = random.Random(seed)
    return [
        Window([draw.randrange(vocabulary) for _ in range(draw.randint(0, longest))], example)
        for example in range(count)
    ]


def prefixes(windows: Sequence[Window]) -> list[tuple[int, ...]]:
    return [
        tuple(window.tokens[: place + 1])
        for window in windows
        for place in range(len(window.tokens))
    ]


TWO_EXAMPLES = [
    Window([5, 6, 7], example=0, offset=0),
    Window([8, 9], example=0, offset=3),
    Window([5, 6], example=2, offset=0),
]


def test_a_key_knows_its_window_example_position_and_token() -> None:
    provenance = provenance_of(TWO_EXAMPLES)
    assert len(provenance) == 7
    assert provenance.window.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert provenance.example.tolist() == [0, 0, 0, 0, 0, 2, 2]
    assert provenance.position.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert provenance.token.tolist() == [5, 6, 7, 8, 9, 5, 6]
    assert provenance.num_examples == 2
    columns = (provenance.window, provenance.example, provenance.position, provenance.token)
    assert {column.dtype for column in columns} == {torch.int64}


def test_only_some_tokens_may_be_keys() -> None:
    provenance = provenance_of(TWO_EXAMPLES, keep={1, 3, 6}.__contains__)
    assert len(provenance) == 3
    assert provenance.example.tolist() == [0, 0, 2]
    assert provenance.position.tolist() == [1, 3, 1]
    assert provenance.token.tolist() == [6, 8, 6]


@pytest.mark.parametrize(
    ("row", "before", "after", "expected"),
    [
        (1, 16, 1, ([5, 6, 7], 1)),
        (2, 16, 1, ([5, 6, 7], 2)),
        (2, 1, 5, ([6, 7], 1)),
        (3, 16, 1, ([8, 9], 0)),
        (5, 0, 0, ([5], 0)),
        (6, 16, 1, ([5, 6], 1)),
    ],
)
def test_context_stays_within_the_window(
    row: int, before: int, after: int, expected: tuple[list[int], int]
) -> None:
    assert provenance_of(TWO_EXAMPLES).context(row, before, after) == expected


def test_context_of_a_key_is_by_row_not_by_place() -> None:
    assert provenance_of(TWO_EXAMPLES, keep={4, 6}.__contains__).context(0) == ([8, 9], 1)


@pytest.mark.parametrize("vocabulary", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_hashes_are_equal_where_prefixes_are(vocabulary: int, seed: int) -> None:
    windows = random_windows(300, vocabulary, longest=9, seed=seed)
    expected = prefixes(windows)
    hashes = provenance_of(windows).prefix_hash().tolist()
    pairs = set(zip(expected, hashes, strict=True))
    assert len(pairs) == len(set(expected)) == len(set(hashes)) < len(hashes)


def test_hashes_are_of_the_keys_alone() -> None:
    windows = random_windows(30, 2, longest=9)
    everything = provenance_of(windows).prefix_hash()
    some = provenance_of(windows, keep=lambda place: place % 3 == 1).prefix_hash()
    assert torch.equal(some, everything[1::3])


def test_hashes_ignore_the_example_and_the_offset() -> None:
    hashes = provenance_of([Window([3, 4]), Window([3, 4], example=1, offset=9)]).prefix_hash()
    assert torch.equal(hashes[:2], hashes[2:])


def test_hashes_of_long_windows_tell_one_early_token_apart() -> None:
    tail = [7] * 2047
    hashes = provenance_of([Window([1, *tail]), Window([2, *tail]), Window([1, *tail])])
    one, two, three = hashes.prefix_hash().view(3, -1)
    assert (one != two).all()
    assert torch.equal(one, three)


def test_hashes_tell_thue_morse_words_apart() -> None:
    word = [place.bit_count() % 2 for place in range(1024)]
    opposite = [1 - token for token in word]
    hashes = provenance_of([Window(word), Window(opposite)]).prefix_hash()
    assert hashes[1023] != hashes[2047]


def test_concatenated_examples_are_numbered_on() -> None:
    first = provenance_of(TWO_EXAMPLES, keep={0, 3, 6}.__contains__)
    second = provenance_of([Window([1, 2], example=0), Window([5, 6], example=1, offset=4)])
    both = concatenate([first, second])
    assert len(both) == 3 + 4
    assert both.example.tolist() == [0, 0, 2, 3, 3, 4, 4]
    assert both.position.tolist() == [0, 3, 1, 0, 1, 4, 5]
    assert both.token.tolist() == [5, 8, 6, 1, 2, 5, 6]
    assert both.num_examples == 4
    assert both.context(6) == ([5, 6], 1)
    assert both.prefix_hash().tolist() == [*first.prefix_hash(), *second.prefix_hash()]
    for column in ("stream", "begin", "example_of_window", "offset_of_window", "key"):
        assert getattr(both, column).dtype == getattr(first, column).dtype


def test_concatenating_one_changes_nothing() -> None:
    part = provenance_of(TWO_EXAMPLES)
    whole = concatenate([part])
    for column in ("stream", "begin", "example_of_window", "offset_of_window", "key"):
        assert torch.equal(getattr(whole, column), getattr(part, column))
