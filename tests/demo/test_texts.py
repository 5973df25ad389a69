"""The demo's text: the reference set, the test set, and that they do not overlap."""

from __future__ import annotations

import pydoc_data.topics
from typing import Any

import pytest

from helpers.tiny import words
from knn_moe import Example
from knn_moe.demo.texts import (
    DemoText,
    load_documentation,
    make_task,
    remove_overlap,
    sample_reference,
)
from knn_moe.reference.examples import tokenise

TEXT = load_documentation()


def test_the_documentation_is_divided_by_topic() -> None:
    topics = set(pydoc_data.topics.topics.values())
    assert {example.completion for example in TEXT.test} <= topics
    assert abs(len(TEXT.test) - len(pydoc_data.topics.topics) / 2) <= 1
    assert len(TEXT.test) - 5 <= len(TEXT.reference) <= len(TEXT.test)
    assert str(len(TEXT.reference)) in TEXT.reference_name
    assert str(len(TEXT.test)) in TEXT.test_name


def test_no_paragraph_is_on_both_sides() -> None:
    reference, test = (
        {" ".join(part.split()) for example in side for part in example.completion.split("\n\n")}
        for side in (TEXT.reference, TEXT.test)
    )
    assert not reference & test
    assert len(reference) > 500


def test_the_reference_keeps_all_else() -> None:
    """Every paragraph of every topic is on one side, and those of the reference in their order."""
    everything = "\n\n".join(e.completion for e in (*TEXT.reference, *TEXT.test))
    kept = {" ".join(part.split()) for part in everything.split("\n\n")}
    for topic in pydoc_data.topics.topics.values():
        assert {" ".join(part.split()) for part in topic.split("\n\n")} <= kept


def test_the_division_is_the_same_every_time() -> None:
    assert load_documentation() == TEXT
    assert load_documentation(seed=1).reference != TEXT.reference


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
    assert remove_overlap(reference, test) == [*plain("three\n\nfour"), Example.of(other)]


def test_a_long_text_without_paragraphs_does_not_fill_the_memory(tiny_tokenizer: Any) -> None:
    lines = plain("\n".join(f"line {number}" for number in range(5000)))
    sample = sample_reference(lines, tiny_tokenizer, 1000)
    assert sum(len(tokenise(piece, tiny_tokenizer).ids) for piece in sample) < 2500
    whole = sample_reference(lines, tiny_tokenizer, 10**9)
    assert "".join(piece.completion for piece in whole) == f"{lines[0].completion}\n\n"


def paragraphs(name: str, count: int) -> str:
    return "\n\n".join(f"{name} {number} " + "word " * 200 for number in range(count))


def test_a_piece_of_each_comes_before_a_second_of_any(tiny_tokenizer: Any) -> None:
    examples = plain(paragraphs("one", 5), paragraphs("two", 1), paragraphs("three", 3))
    pieces = sample_reference(examples, tiny_tokenizer, 10**6)
    names = [" ".join(piece.completion.split()[:2]) for piece in pieces]
    first, *later = ["one 0", "two 0", "three 0"], ["one 1", "three 1"], ["one 2", "three 2"]
    assert names == [*first, *(name for turn in later for name in turn), "one 3", "one 4"]


def test_pieces_are_the_whole_text(tiny_tokenizer: Any) -> None:
    examples = sorted(TEXT.test, key=lambda example: len(example.completion))[-3:]
    pieces = [piece.completion for piece in sample_reference(examples, tiny_tokenizer, 10**9)]
    assert len(pieces) > 6
    for example in examples:
        rest = f"{example.completion}\n\n"
        while rest:
            fitting = [piece for piece in pieces if rest.startswith(piece)]
            assert fitting
            rest = rest.removeprefix(max(fitting, key=len))
    assert max(map(len, pieces)) < 1600


@pytest.mark.parametrize("tokens", [1, 500, 5000])
def test_a_sample_stops_with_the_piece_that_fills_it(tokens: int, tiny_tokenizer: Any) -> None:
    sample = sample_reference(TEXT.reference, tiny_tokenizer, tokens)
    lengths = [len(tokenise(piece, tiny_tokenizer).ids) for piece in sample]
    assert sum(lengths[:-1]) < tokens <= sum(lengths)
    assert sum(lengths) < tokens + 2000
    assert len(sample_reference(TEXT.reference, tiny_tokenizer, 10**6)) > len(sample)


def chatty_tokenizer() -> Any:
    tokenizer = words()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return tokenizer


def test_prompts_and_conversations_stay_whole() -> None:
    long = paragraphs("long", 9)
    examples = [
        Example.of({"prompt": long, "completion": long}),
        Example.of([{"role": "user", "content": long}, {"role": "assistant", "content": "yes"}]),
    ]
    assert sample_reference(examples, chatty_tokenizer(), 10**6) == examples


def test_the_task_asks_for_every_token_of_the_test_set() -> None:
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    examples = [*plain("one"), Example.of({"prompt": "a", "completion": "b"}), Example.of(chat)]
    data = make_task(DemoText([], examples, "some", "other"), chatty_tokenizer())
    assert [row["text"] for row in data.test] == ["one", "ab", "hello\nyes\n"]
    assert (data.task.kind.scorings, data.source) == (("text",), "other")
