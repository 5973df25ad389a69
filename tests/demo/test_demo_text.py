"""The demo's text: what is remembered, what is tried, and that the two are apart."""

from __future__ import annotations

import pydoc_data.topics
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from knn_moe import Example
from knn_moe.demo.demo import DemoConfig
from knn_moe.demo.texts import (
    CHOICES,
    DemoText,
    TestSet,
    apart,
    documentation,
    make_test_set,
    sample_reference,
)
from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import tokenise
from knn_moe.support.embedded_models import embedded_model

CONFIG = DemoConfig(length=128, reference_tokens=2000, windows=7, choices=8)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe"))


@pytest.fixture(scope="module")
def text() -> DemoText:
    return documentation()


@pytest.fixture(scope="module")
def test_set(text: DemoText, tokenizer: Any) -> TestSet:
    return make_test_set(text.test, tokenizer, CONFIG.length, CONFIG.windows, CONFIG.choices)


def test_the_documentation_is_divided_by_topic(text: DemoText) -> None:
    topics = set(pydoc_data.topics.topics.values())
    assert {example.completion for example in text.test} <= topics
    assert abs(len(text.test) - len(pydoc_data.topics.topics) / 2) <= 1
    assert len(text.test) - 5 <= len(text.reference) <= len(text.test)
    assert str(len(text.reference)) in text.reference_name
    assert str(len(text.test)) in text.test_name


def test_no_paragraph_is_on_both_sides(text: DemoText) -> None:
    reference, test = (
        {" ".join(part.split()) for example in side for part in example.completion.split("\n\n")}
        for side in (text.reference, text.test)
    )
    assert not reference & test
    assert len(reference) > 500


def test_the_reference_keeps_all_else(text: DemoText) -> None:
    """Every paragraph of every topic is on one side, and those of the reference in their order."""
    everything = "\n\n".join(e.completion for e in (*text.reference, *text.test))
    kept = {" ".join(part.split()) for part in everything.split("\n\n")}
    for topic in pydoc_data.topics.topics.values():
        assert {" ".join(part.split()) for part in topic.split("\n\n")} <= kept


def test_the_division_is_the_same_every_time(text: DemoText) -> None:
    assert documentation() == text
    assert documentation(seed=1).reference != text.reference


def plain(*texts: str) -> list[Example]:
    return [Example.of(text) for text in texts]


def test_what_the_test_has_leaves_the_reference() -> None:
    prompt, other = ({"prompt": "a", "completion": end} for end in ("b", "c"))
    chat = [{"role": "user", "content": "hello"}]
    test = [*plain("one\n\ntwo  words"), Example.of(prompt), Example.of(chat)]
    reference = [
        *plain("three\n\ntwo words\n\nfour", "two words", "one"),
        *(Example.of(item) for item in (prompt, other, chat)),
    ]
    assert apart(reference, test) == [*plain("three\n\nfour"), Example.of(other)]


def test_a_long_text_without_paragraphs_does_not_fill_the_memory(tokenizer: Any) -> None:
    lines = plain("\n".join(f"line {number}" for number in range(5000)))
    sample = sample_reference(lines, tokenizer, 1000)
    assert sum(len(tokenise(piece, tokenizer).ids) for piece in sample) < 2500
    whole = sample_reference(lines, tokenizer, 10**9)
    assert "".join(piece.completion for piece in whole) == f"{lines[0].completion}\n\n"


def paragraphs(name: str, count: int) -> str:
    return "\n\n".join(f"{name} {number} " + "word " * 200 for number in range(count))


def test_a_piece_of_each_comes_before_a_second_of_any(tokenizer: Any) -> None:
    examples = plain(paragraphs("one", 5), paragraphs("two", 1), paragraphs("three", 3))
    pieces = sample_reference(examples, tokenizer, 10**6)
    names = [" ".join(piece.completion.split()[:2]) for piece in pieces]
    first, *later = ["one 0", "two 0", "three 0"], ["one 1", "three 1"], ["one 2", "three 2"]
    assert names == [*first, *(name for turn in later for name in turn), "one 3", "one 4"]


def test_pieces_are_the_whole_text(tokenizer: Any, text: DemoText) -> None:
    examples = sorted(text.test, key=lambda example: len(example.completion))[-3:]
    pieces = [piece.completion for piece in sample_reference(examples, tokenizer, 10**9)]
    assert len(pieces) > 6
    for example in examples:
        rest = f"{example.completion}\n\n"
        while rest:
            fitting = [piece for piece in pieces if rest.startswith(piece)]
            assert fitting
            rest = rest.removeprefix(max(fitting, key=len))
    assert max(map(len, pieces)) < 1600


@pytest.mark.parametrize("tokens", [1, 500, 5000])
def test_a_sample_stops_with_the_piece_that_fills_it(
    tokens: int, tokenizer: Any, text: DemoText
) -> None:
    sample = sample_reference(text.reference, tokenizer, tokens)
    lengths = [len(tokenise(piece, tokenizer).ids) for piece in sample]
    assert sum(lengths[:-1]) < tokens <= sum(lengths)
    assert sum(lengths) < tokens + 2000
    assert len(sample_reference(text.reference, tokenizer, 10**6)) > len(sample)


def test_prompts_and_conversations_stay_whole(tokenizer: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    long = paragraphs("long", 9)
    examples = [
        Example.of({"prompt": long, "completion": long}),
        Example.of([{"role": "user", "content": long}, {"role": "assistant", "content": "yes"}]),
    ]
    assert sample_reference(examples, tokenizer, 10**6) == examples


def test_a_test_set_is_windows_and_choices(test_set: TestSet, tokenizer: Any) -> None:
    assert test_set.windows.shape == (7, 128)
    assert test_set.contexts.shape == (8, 48)
    assert test_set.continuations.shape == (8, CHOICES, 12)
    assert test_set.answers.shape == (8,)
    assert set(test_set.answers.tolist()) <= set(range(CHOICES))


def numbered(count: int) -> list[Example]:
    return plain(" ".join(f"{number:05d}" for number in range(count)))


def test_the_true_continuation_is_the_one_that_follows(tokenizer: Any) -> None:
    found = make_test_set(numbered(400), tokenizer, 64, 5, 12)
    stream = [*tokenizer(numbered(400)[0].completion)["input_ids"], tokenizer.eos_token_id]
    text = " ".join(map(str, stream))
    endings = found.continuations[torch.arange(12), found.answers].tolist()
    for item, (context, true) in enumerate(zip(found.contexts.tolist(), endings, strict=True)):
        assert " ".join(map(str, [*context, *true])) in text
        others = found.continuations[item, torch.arange(CHOICES) != found.answers[item]].tolist()
        assert all(other in endings[:item] + endings[item + 1 :] for other in others)
        assert len({tuple(other) for other in (*others, true)}) == CHOICES


def test_windows_are_spread_over_all_examples(tokenizer: Any) -> None:
    examples = plain(*(f"{name} " * 300 for name in ("one", "two", "three", "four")))
    found = make_test_set(examples, tokenizer, 32, 8, 8)
    seen = {word for window in found.windows for word in tokenizer.decode(window).split()}
    assert {"one", "two", "three", "four"} <= seen
    everything = make_test_set(examples, tokenizer, 32, 10**6, 8).windows.flatten().tolist()
    ends = [tokenizer.eos_token_id]
    stream = [t for e in examples for t in tokenizer(e.completion)["input_ids"] + ends]
    assert everything == stream[: len(everything)]
    assert len(stream) - len(everything) < 32


def test_the_test_set_is_the_same_every_time(
    text: DemoText, tokenizer: Any, test_set: TestSet
) -> None:
    again = make_test_set(text.test, tokenizer, CONFIG.length, CONFIG.windows, CONFIG.choices)
    for name, tensor in vars(test_set).items():
        assert torch.equal(tensor, getattr(again, name)), name


def test_too_short_a_test_text_is_told(tokenizer: Any) -> None:
    words = tokenizer.decode(tokenizer(numbered(400)[0].completion)["input_ids"][:511])
    length = len(tokenizer(words)["input_ids"])
    assert length == 511
    with pytest.raises(ReferenceSetError, match=r"has 511 tokens; the demo needs at least 514"):
        # With its end, the text has one token more than its words.
        make_test_set(
            plain(tokenizer.decode(tokenizer(words)["input_ids"][:-1])), tokenizer, 257, 4, 4
        )
    assert len(make_test_set(plain(words), tokenizer, 256, 4, 4).windows) == 2
