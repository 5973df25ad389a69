"""Every token gets the characters that it completes, and no character is lost or torn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from knn_moe.support.characters import CharacterStream, character_pieces
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model

TEXTS = ("He said: don’t go 👩\u200d🚀!", "我们不知道。", "naïve 🙂🙃 한국어", "a � b", "\n\t x")


@pytest.fixture(scope="module", params=EMBEDDED_MODELS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return AutoTokenizer.from_pretrained(embedded_model(request.param))


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama's: bytes for what it has no token for, and the first space dropped."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "▁a": 257}
    inner = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")  # type: ignore[call-arg]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_whole_characters_and_the_whole_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    pieces = character_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert sum(piece.count("�") for piece in pieces) == text.count("�")


def test_the_token_that_completes_a_character_gets_it(tokenizer: Any) -> None:
    text = "don’t"
    ids = tokenizer(text)["input_ids"]
    assert "�" in "".join(tokenizer.decode([token]) for token in ids)  # the case is a real one
    assert [piece for piece in character_pieces(tokenizer, ids) if "’" in piece] != []
    assert "" in character_pieces(tokenizer, ids)


def test_a_text_that_ends_inside_a_character(tokenizer: Any) -> None:
    ids = tokenizer("so 🙂")["input_ids"][:-1]
    pieces = character_pieces(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[-1].endswith("�")
    assert character_pieces(tokenizer, []) == []


def test_a_stream_leaves_special_tokens_out(tokenizer: Any) -> None:
    ids = [*tokenizer("It’s")["input_ids"], tokenizer.eos_token_id]
    stream = CharacterStream(tokenizer, skip_special_tokens=True)
    assert "".join(map(stream.push, ids)) + stream.finish() == "It’s"
    assert character_pieces(tokenizer, ids)[-1] == tokenizer.eos_token


def test_bytes_of_a_tokenizer_that_falls_back_on_them(
    byte_fallback: PreTrainedTokenizerFast,
) -> None:
    ids = [257, *"日本".encode(), 257, 257]
    pieces = character_pieces(byte_fallback, ids)
    assert pieces == ["a", "", "", "日", "", "", "本", " a", " a"]


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_no_text_is_torn(byte_fallback: PreTrainedTokenizerFast, text: str) -> None:
    ids = list(text.encode())
    assert "".join(character_pieces(byte_fallback, ids)) == byte_fallback.decode(ids)
