"""experiments/corpus.py: documents, tokens, windows and samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corpus import (
    cut_windows,
    encode_documents,
    load_validation_windows,
    read_texts,
    sample_texts,
)
from helpers.small_corpus import make_sentences


def test_a_domains_documents_are_read_in_order(small_data: Path) -> None:
    texts = read_texts(small_data, "legal", "train")
    assert texts == [make_sentences("legal", f"train {n}", 30) for n in range(6)]
    problem = read_texts(small_data, "gsm8k", "valid")[1]
    assert problem == f"{make_sentences('sums', 'valid 1', 15)}\n{'It is 1. ' * 40}"


def test_the_tokenizer_has_the_wanted_size_and_loses_nothing(small_tokenizer: Any) -> None:
    assert len(small_tokenizer) == 300
    assert small_tokenizer.convert_ids_to_tokens([0, 1]) == ["<|endoftext|>", "<|pad|>"]
    assert (
        small_tokenizer.bos_token_id,
        small_tokenizer.eos_token_id,
        small_tokenizer.pad_token_id,
    ) == (0, 0, 1)
    for text in ("the cat in python 17.", "\n\tΩ 日本 \r\n", "never seen: zyx!"):
        assert small_tokenizer.decode(small_tokenizer(text)["input_ids"]) == text
    assert {
        token for token in small_tokenizer.get_vocab() if set(token) & set("0123456789")
    } == set("0123456789")


def test_encode_marks_the_end_of_each_document(small_tokenizer: Any, small_data: Path) -> None:
    texts = read_texts(small_data, "python", "train")
    documents = encode_documents(small_tokenizer, texts)
    for text, document in zip(texts, documents, strict=True):
        assert document.dtype == torch.int32
        assert document.tolist() == [
            *small_tokenizer(text)["input_ids"],
            small_tokenizer.eos_token_id,
        ]


def test_windows_without_a_generator_are_the_text_itself() -> None:
    documents = [torch.arange(0, 7), torch.arange(7, 20), torch.arange(20, 23)]
    assert torch.equal(cut_windows(documents, 5), torch.arange(20).view(4, 5))


def test_validation_windows_are_the_beginning_of_the_validation_text(
    small_tokenizer: Any, small_data: Path
) -> None:
    found = load_validation_windows(small_tokenizer, small_data, ("sql",))["sql"].flatten().tolist()
    joined = "<|endoftext|>".join(read_texts(small_data, "sql", "valid"))
    assert joined.startswith(small_tokenizer.decode(found))


@given(st.integers(0, 1000), st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_an_epoch_reads_every_token_once_but_for_its_edges(seed: int, lengths: list[int]) -> None:
    length, total = 4, sum(lengths)
    documents = list(torch.arange(total, dtype=torch.int32).split(lengths))
    epoch = cut_windows(documents, length, torch.Generator().manual_seed(seed))
    assert epoch.shape[1] == length
    read = epoch.flatten().tolist()
    assert len(set(read)) == len(read)
    assert total - len(read) <= 2 * (length - 1)  # skipped before, cut off behind
    ends = {int(document[-1]) for document in documents}
    starts = {int(document[0]) for document in documents}
    for window in epoch.tolist():  # a text is never torn but at a window's edge
        for one, two in itertools.pairwise(window):
            assert two == one + 1 or (one in ends and two in starts)


def test_every_epoch_has_an_order_of_its_own() -> None:
    documents = list(torch.arange(120).split(10))
    generator = torch.Generator().manual_seed(0)
    first, second = (cut_windows(documents, 8, generator) for _ in range(2))
    again = cut_windows(documents, 8, torch.Generator().manual_seed(0))
    assert torch.equal(first, again)
    assert first.tolist() != second.tolist()
    one_text = cut_windows([torch.arange(120)], 8, generator).tolist()  # its windows, too
    assert one_text != sorted(one_text)


def sampled_tokens(small_tokenizer: Any, texts: Sequence[str]) -> Iterator[int]:
    return (token for text in texts for token in small_tokenizer(text)["input_ids"])


@pytest.mark.parametrize("tokens", [1, 1000])
def test_a_sample_has_the_wanted_number_of_tokens(
    tokens: int, small_tokenizer: Any, small_data: Path
) -> None:
    texts = read_texts(small_data, "sql", "train")
    sample = sample_texts(small_tokenizer, texts, tokens)
    assert len(list(sampled_tokens(small_tokenizer, sample))) == tokens
    *whole, last = sample
    assert set(whole) <= set(texts)
    assert any(text.startswith(last) for text in texts)
    assert sample == sample_texts(small_tokenizer, texts, tokens)


def test_a_larger_sample_begins_with_the_smaller(small_tokenizer: Any, small_data: Path) -> None:
    texts = read_texts(small_data, "sql", "train")
    small, large = (sample_texts(small_tokenizer, texts, tokens) for tokens in (700, 1400))
    few = list(sampled_tokens(small_tokenizer, small))
    assert list(sampled_tokens(small_tokenizer, large))[: len(few)] == few


@pytest.mark.parametrize("tokens", [1, 700])
def test_what_is_skipped_is_never_sampled(
    tokens: int, small_tokenizer: Any, small_data: Path
) -> None:
    texts = read_texts(small_data, "sql", "train")
    first = sample_texts(small_tokenizer, texts, tokens)
    second = sample_texts(small_tokenizer, texts, 600, skip=tokens)
    assert len(list(sampled_tokens(small_tokenizer, second))) == 600

    def places(sample: list[str]) -> set[int]:
        return {n for n, text in enumerate(texts) if any(map(text.startswith, sample))}

    assert places(first)
    assert places(second)
    assert not places(first) & places(second)


def test_too_little_text_to_sample(small_tokenizer: Any, small_data: Path) -> None:
    texts = read_texts(small_data, "sql", "train")
    there = len(list(sampled_tokens(small_tokenizer, texts)))
    assert sorted(sample_texts(small_tokenizer, texts, there)) == sorted(texts)
    with pytest.raises(ValueError, match=rf"{there:,} tokens, but {there + 1:,} are needed"):
        sample_texts(small_tokenizer, texts, there + 1)
