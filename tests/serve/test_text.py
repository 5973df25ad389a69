"""Text as it comes: whole characters, stop strings over several tokens, tokens with their text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from helpers.tiny import words
from knn_moe.bench.models import number_tokenizer
from knn_moe.serve.prompts import Encoder
from knn_moe.serve.refused import RefusedError
from knn_moe.serve.sampling import Token
from knn_moe.serve.text import AnswerText, Piece, StopSearch, token_bytes

END = 99_999  # no token of the tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return words()


def answer(tokenizer: Any, text: str, *stops: str, end: bool = False) -> list[Piece]:
    """The pieces of an answer whose tokens are those of `text`."""
    found = AnswerText(tokenizer, stops, frozenset([END]))
    pieces = []
    for id in tokenizer(text)["input_ids"] + [END] * end:
        pieces.append(found.push(Token(id)))
        if found.ended:
            return pieces
    return [*pieces, found.finish()]


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@settings(deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_a_stop_string_is_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    search = StopSearch(stops)
    ends = [*sorted(cuts), len(text)]
    given_text = ""
    for begin, end in zip([0, *ends], ends, strict=False):
        given_text += search.push(text[begin:end])
        assert text.startswith(given_text)
        if search.found:
            break
    else:
        given_text += search.finish()
    places = [text.find(stop) for stop in stops if stop in text]
    assert search.found == bool(places)
    # The first to be complete ends the text, and nothing from it on is given.
    assert not any(stop in given_text for stop in stops)
    assert text.startswith(given_text)
    if not places:
        assert given_text == text


def test_a_stop_string_that_spans_tokens(tokenizer: Any) -> None:
    text = "The judge said no. The end of it."
    assert len(tokenizer(". The end")["input_ids"]) > 2
    pieces = answer(tokenizer, text, ". The end")
    assert joined(pieces) == "The judge said no"
    assert pieces[-1].reason == "stop"
    # What was nearly a stop string is given when it is known to be none.
    pieces = answer(tokenizer, text, ". The ending", "zzz")
    assert joined(pieces) == text
    assert pieces[-1].reason == "length"


def test_characters_are_not_torn(tokenizer: Any) -> None:
    text = "naïve 東京 🎈🎈 ok"
    pieces = answer(tokenizer, text)
    assert joined(pieces) == text
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert joined(answer(tokenizer, text, "京")) == "naïve 東"
    assert joined(answer(tokenizer, text, "🎈 ok")) == "naïve 東京 🎈"


def test_tokens_come_with_their_text(tokenizer: Any) -> None:
    text = "naïve 東京 🎈 said the judge. The end"
    ids = tokenizer(text)["input_ids"]
    pieces = answer(tokenizer, text, end=True)
    assert [placed.token.id for piece in pieces for placed in piece.tokens] == ids
    assert pieces[-1].reason == "stop"
    given_text = ""
    for piece in pieces:
        given_text += piece.text
        for placed in piece.tokens:
            assert placed.offset < len(given_text)
    stopped = answer(tokenizer, text, " judge")
    told = [placed for piece in stopped for placed in piece.tokens]
    assert joined(stopped) == "naïve 東京 🎈 said the"
    assert [placed.token.id for placed in told] == ids[: len(told)]
    assert all(placed.offset < len(joined(stopped)) for placed in told)


def test_bytes_of_tokens(tokenizer: Any) -> None:
    text = "naïve 🎈 ok"
    ids = tokenizer(text)["input_ids"]
    parts = [token_bytes(tokenizer, id) for id in ids]
    assert bytes(byte for part in parts if part is not None for byte in part) == text.encode()


def test_conversations_without_and_with_a_template() -> None:
    tokenizer: PreTrainedTokenizerFast = number_tokenizer(64)
    said = [
        {"role": "developer", "content": "3"},
        {"role": "user", "content": "4 5"},
        {"role": "assistant", "content": " 6"},
        {"role": "user", "content": "7"},
    ]
    encoder = Encoder(tokenizer, 64)
    assert not encoder.has_template
    plain = tokenizer("3\n4 5 6\n7")["input_ids"]
    assert encoder.encode(said) == plain
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ 60 if m.role == 'system' else 61 }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}62{% endif %}"
    )
    ids = tokenizer("60 3 61 4 5 61  6 61 7 62", add_special_tokens=False)["input_ids"]
    assert encoder.encode(said) == ids
    with pytest.raises(RefusedError, match="no tools"):
        encoder.encode([{"role": "tool", "content": "1"}])
    with pytest.raises(RefusedError, match="from 0 to 63, got 64"):
        encoder.encode([3, 64])
    with pytest.raises(RefusedError, match="no tokens"):
        encoder.encode("")
