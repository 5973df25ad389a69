"""Windows and batches: every token once, every case in its row, no batch larger than asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers.zoo import make_texts
from knn_moe.config import BuildConfig
from knn_moe.errors import ReferenceSetError
from knn_moe.reference import windows as batches
from knn_moe.reference.examples import Example, ExampleLike
from knn_moe.reference.windows import ReferenceTokens, make_batch, plan_batches, read_tokens

both_kinds = pytest.mark.parametrize("tokens", ["all", "completion"])

PAIRS = [
    {"prompt": text[: len(text) // 2], "completion": text[len(text) // 2 :]}
    for text in make_texts(40)
]


def read(
    tokenizer: Any, items: Sequence[ExampleLike], tokens: str = "all", max_length: int = 2048
) -> ReferenceTokens:
    examples = [Example.of(item) for item in items]
    return read_tokens(examples, tokenizer, BuildConfig(tokens=tokens), max_length)


def test_a_long_text_is_cut_into_windows(zoo_tokenizer: Any) -> None:
    reference = read(zoo_tokenizer, ["11 12 13 14 15", "21 22 23"], max_length=2)
    provenance = reference.provenance
    assert reference.lengths.tolist() == [2, 2, 1, 2, 1]
    assert provenance.stream.tolist() == [11, 12, 13, 14, 15, 21, 22, 23]
    assert provenance.example_of_window.tolist() == [0, 0, 0, 1, 1]
    assert provenance.offset_of_window.tolist() == [0, 2, 4, 0, 2]
    assert (provenance.stream.dtype, provenance.key.dtype) == (torch.int32, torch.int64)


def test_all_tokens_are_kept_and_scored_but_for_the_last(zoo_tokenizer: Any) -> None:
    reference = read(zoo_tokenizer, ["11 12 13 14 15", "21"], max_length=3)
    assert reference.scored.tolist() == [True, True, False, True, False, False]
    assert reference.kept.all()
    assert reference.provenance.key.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("max_length", "scored"),
    [
        (9, [False, True, True, True, False]),  # the last token of the prompt foretells the first
        (3, [False, True, False, True, False]),  # nothing before 14 is in its window
        (2, [False, False, True, False, False]),
    ],
)
def test_only_tokens_that_predict_the_completion_are_kept(
    max_length: int, scored: list[bool], zoo_tokenizer: Any
) -> None:
    pair = {"prompt": "11 12", "completion": " 13 14 15"}
    reference = read(zoo_tokenizer, [pair], "completion", max_length)
    assert reference.scored.tolist() == reference.kept.tolist() == scored
    assert reference.provenance.key.tolist() == [place for place, here in enumerate(scored) if here]


@pytest.mark.parametrize(
    ("tokens", "loss", "kept", "scored"),
    [
        ("all", "completion", [1, 1, 1, 1], [0, 1, 1, 0]),
        ("completion", "all", [0, 1, 1, 0], [1, 1, 1, 0]),
        ("completion", None, [0, 1, 1, 0], [0, 1, 1, 0]),
    ],
)
def test_cases_and_the_loss_may_be_of_other_tokens(
    tokens: str, loss: str | None, kept: list[int], scored: list[int], zoo_tokenizer: Any
) -> None:
    examples = [Example("11 12", " 13 14")]
    config = BuildConfig(tokens=tokens, loss=loss)
    reference = read_tokens(examples, zoo_tokenizer, config, 2048)
    assert reference.kept.int().tolist() == kept
    assert reference.scored.int().tolist() == scored


def test_a_plain_text_is_all_completion(zoo_tokenizer: Any) -> None:
    reference = read(zoo_tokenizer, ["11 12 13"], "completion")
    assert reference.kept.tolist() == [True, True, False]


def test_an_empty_example_is_passed_over_and_still_counted(zoo_tokenizer: Any) -> None:
    reference = read(zoo_tokenizer, ["", "11 12", "", "21"])
    assert reference.provenance.example.tolist() == [1, 1, 3]
    assert reference.lengths.tolist() == [2, 1]


@pytest.mark.parametrize("items", [[], ["", ""]])
def test_no_tokens_at_all(items: list[str], zoo_tokenizer: Any) -> None:
    with pytest.raises(ReferenceSetError, match="holds no tokens"):
        read(zoo_tokenizer, items)


def test_no_completion(zoo_tokenizer: Any) -> None:
    items = [{"prompt": "11 12", "completion": ""}, "21"]
    assert len(read(zoo_tokenizer, items).provenance) == 3
    with pytest.raises(ReferenceSetError, match=r"no completion to learn from.*Use all"):
        read(zoo_tokenizer, items, "completion")


def random_lengths(count: int, longest: int = 60) -> list[int]:
    draw = random.Random(count)
    return [draw.randint(1, longest) for _ in range(count)]


@pytest.mark.parametrize("batch_tokens", [1, 59, 64, 1000, 10**6])
@pytest.mark.parametrize("count", [1, 2, 17, 300])
def test_batches_hold_every_window_once_within_the_limit(count: int, batch_tokens: int) -> None:
    lengths = random_lengths(count)
    plan = list(plan_batches(torch.tensor(lengths), batch_tokens))
    assert sorted(window for batch in plan for window in batch) == list(range(count))
    for batch in plan:
        padded = len(batch) * max(lengths[window] for window in batch)
        assert padded <= batch_tokens or len(batch) == 1


def test_the_longest_window_comes_first() -> None:
    lengths = random_lengths(200)
    plan = list(plan_batches(torch.tensor(lengths), 128))
    in_order = [lengths[window] for batch in plan for window in batch]
    assert in_order == sorted(lengths, reverse=True)


def test_no_batch_has_room_for_the_window_after_it() -> None:
    lengths = random_lengths(200)
    plan = list(plan_batches(torch.tensor(lengths), 128))
    assert all((len(batch) + 1) * lengths[batch[0]] > 128 for batch in plan[:-1])


def test_no_windows_are_no_batches() -> None:
    assert list(plan_batches(torch.tensor([], dtype=torch.int64), 128)) == []


def test_windows_are_sorted_a_pool_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_POOL", 3)
    plan = list(plan_batches(torch.tensor([1, 2, 3, 4, 5, 6, 7]), 10**6))
    assert plan == [[2, 1, 0], [5, 4, 3], [6]]


def test_a_batch_is_padded_on_the_right(zoo_tokenizer: Any) -> None:
    reference = read(zoo_tokenizer, ["11 12 13", "21"])
    batch = make_batch(reference, [1, 0])
    assert batch.ids.tolist() == [[21, 0, 0], [11, 12, 13]]
    assert batch.real.tolist() == [[True, False, False], [True, True, True]]
    assert batch.scored.tolist() == [[False, False, False], [True, True, False]]
    assert batch.padded
    assert batch.kept_places is not None
    assert batch.kept_places.tolist() == [0, 3, 4, 5]
    assert batch.spans == [(3, 0, 1), (0, 1, 3)]


def test_windows_of_one_length_are_not_padded(zoo_tokenizer: Any) -> None:
    batch = make_batch(read(zoo_tokenizer, ["11 12", "21 22"]), [0, 1])
    assert not batch.padded
    assert batch.kept_places is None
    assert batch.spans == [(0, 0, 4)]  # rows that follow one another are one run


def test_a_window_without_cases_has_no_span(zoo_tokenizer: Any) -> None:
    items = [{"prompt": "11 12", "completion": ""}, {"prompt": "21", "completion": " 22"}]
    batch = make_batch(read(zoo_tokenizer, items, "completion"), [0, 1])
    assert batch.kept_places is not None
    assert batch.kept_places.tolist() == [2]
    assert batch.spans == [(0, 0, 1)]


@both_kinds
@pytest.mark.parametrize("max_length", [2, 5, 2048])
@pytest.mark.parametrize("batch_tokens", [1, 50, 10**6])
def test_batches_fill_every_row_with_its_own_token(
    tokens: str, max_length: int, batch_tokens: int, zoo_tokenizer: Any
) -> None:
    reference = read(zoo_tokenizer, PAIRS, tokens, max_length)
    provenance = reference.provenance
    filled = torch.full((len(provenance),), -1)
    scored = 0
    for windows in plan_batches(reference.lengths, batch_tokens):
        batch = make_batch(reference, windows)
        flat = batch.ids.flatten()
        kept = flat if batch.kept_places is None else flat[batch.kept_places]
        scored += int(batch.scored.sum())
        assert sum(count for *_, count in batch.spans) == len(kept)
        for row, first, count in batch.spans:
            assert filled[row : row + count].eq(-1).all()
            filled[row : row + count] = kept[first : first + count]
    assert torch.equal(filled, provenance.token)
    assert scored == int(reference.scored.sum())
