"""The text that the training scripts read: documents, tokens, windows, samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corpus import SEEN, encode, read_texts, sample_texts, train_tokenizer, windows
from helpers.small_corpus import sentences, write_corpus

VOCABULARY = 300


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Any:
    texts = [text for domain in SEEN for text in read_texts(data, domain, "train")]
    return train_tokenizer(texts, VOCABULARY)


def test_a_domains_documents_are_read_in_order(data: Path) -> None:
    texts = read_texts(data, "legal", "train")
    assert texts == [sentences("legal", f"train {n}", 30) for n in range(6)]
    problem = read_texts(data, "gsm8k", "valid")[1]
    assert problem == f"{sentences('sums', 'valid 1', 15)}\n{'It is 1. ' * 40}"


def test_the_tokenizer_has_the_size_asked_for_and_loses_nothing(tokenizer: Any) -> None:
    assert len(tokenizer) == 300
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["<|endoftext|>", "<|pad|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    for text in ("the cat in python 17.", "\n\tΩ 日本 \r\n", "never seen: zyx!"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert {token for token in tokenizer.get_vocab() if set(token) & set("0123456789")} == set(
        "0123456789"
    )


def test_encode_marks_the_end_of_each_document(tokenizer: Any, data: Path) -> None:
    texts = read_texts(data, "python", "train")
    documents = encode(tokenizer, texts)
    for text, document in zip(texts, documents, strict=True):
        assert document.dtype == torch.int32
        assert document.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def test_windows_without_a_generator_are_the_text_itself() -> None:
    documents = [torch.arange(0, 7), torch.arange(7, 20), torch.arange(20, 23)]
    assert torch.equal(windows(documents, 5), torch.arange(20).view(4, 5))


@given(st.integers(0, 1000), st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_an_epoch_reads_every_token_once_but_for_its_edges(seed: int, lengths: list[int]) -> None:
    length, total = 4, sum(lengths)
    documents = list(torch.arange(total, dtype=torch.int32).split(lengths))
    epoch = windows(documents, length, torch.Generator().manual_seed(seed))
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
    first, second = (windows(documents, 8, generator) for _ in range(2))
    again = windows(documents, 8, torch.Generator().manual_seed(0))
    assert torch.equal(first, again)
    assert first.tolist() != second.tolist()
    one_text = windows([torch.arange(120)], 8, generator).tolist()  # its windows, too
    assert one_text != sorted(one_text)


def sampled_tokens(tokenizer: Any, texts: Sequence[str]) -> Iterator[int]:
    return (token for text in texts for token in tokenizer(text)["input_ids"])


@pytest.mark.parametrize("tokens", [1, 50, 500, 1000])
def test_a_sample_has_as_many_tokens_as_asked_for(tokens: int, tokenizer: Any, data: Path) -> None:
    texts = read_texts(data, "medical", "train")
    sample = sample_texts(tokenizer, texts, tokens)
    assert len(list(sampled_tokens(tokenizer, sample))) == tokens
    *whole, last = sample
    assert set(whole) <= set(texts)
    assert any(text.startswith(last) for text in texts)
    assert sample == sample_texts(tokenizer, texts, tokens)


def test_a_larger_sample_begins_with_the_smaller(tokenizer: Any, data: Path) -> None:
    texts = read_texts(data, "medical", "train")
    small, large = (sample_texts(tokenizer, texts, tokens) for tokens in (700, 1400))
    few = list(sampled_tokens(tokenizer, small))
    assert list(sampled_tokens(tokenizer, large))[: len(few)] == few


@pytest.mark.parametrize("tokens", [1, 700, 1400])
def test_what_is_skipped_is_never_sampled(tokens: int, tokenizer: Any, data: Path) -> None:
    texts = read_texts(data, "medical", "train")
    first = sample_texts(tokenizer, texts, tokens)
    second = sample_texts(tokenizer, texts, 600, skip=tokens)
    assert len(list(sampled_tokens(tokenizer, second))) == 600

    def places(sample: list[str]) -> set[int]:
        return {n for n, text in enumerate(texts) if any(map(text.startswith, sample))}

    assert places(first)
    assert places(second)
    assert not places(first) & places(second)


def test_too_little_text_to_sample(tokenizer: Any, data: Path) -> None:
    texts = read_texts(data, "medical", "train")
    there = len(list(sampled_tokens(tokenizer, texts)))
    assert sorted(sample_texts(tokenizer, texts, there)) == sorted(texts)
    with pytest.raises(ValueError, match=rf"{there:,} tokens of text; {there + 1:,} were asked"):
        sample_texts(tokenizer, texts, there + 1)
