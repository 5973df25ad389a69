"""Replies token by token: the text is that of the tokens, whole characters at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from knn_moe.errors import ConfigError
from knn_moe.inference.streaming import Reply, Sampling, context_length, room_after, stream_reply


def encode(tokenizer: Any, text: str) -> dict[str, torch.Tensor]:
    return dict(tokenizer(text, return_tensors="pt"))


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_a_reply_is_what_the_model_generates(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, temperature: float
) -> None:
    pieces: list[str] = []
    reply = Reply(tiny_tokenizer, pieces.append)
    inputs = encode(tiny_tokenizer, "A fever — is")
    sampling = Sampling(max_new_tokens=40, temperature=temperature, seed=3)
    stream_reply(tiny_olmoe, inputs, reply, sampling, pad_token=1)
    torch.manual_seed(3)
    drawn = {"do_sample": True, "temperature": temperature} if temperature else {}
    whole = tiny_olmoe.generate(**inputs, **drawn, max_new_tokens=40, pad_token_id=1)[0].tolist()
    assert reply.prompt + reply.ids == whole
    expected = tiny_tokenizer.decode(reply.ids, skip_special_tokens=True)
    assert "".join(pieces) == reply.text == expected
    assert len(pieces) > 5


def test_characters_are_not_torn(tiny_tokenizer: Any) -> None:
    text = "naïve 東京 🎈 ok"
    pieces: list[str] = []
    reply = Reply(tiny_tokenizer, pieces.append)
    reply.put(torch.tensor([[5, 6]]))
    for token in tiny_tokenizer(text)["input_ids"]:
        reply.put(torch.tensor([token]))
    reply.end()
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_an_interrupted_reply_has_what_came(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    def stop(piece: str) -> None:
        if len(reply.ids) == 4:
            raise KeyboardInterrupt

    reply = Reply(tiny_tokenizer, stop)
    with pytest.raises(KeyboardInterrupt):
        stream_reply(tiny_olmoe, encode(tiny_tokenizer, "A fever"), reply, Sampling(), pad_token=1)
    assert len(reply.ids) == 4
    assert reply.text == tiny_tokenizer.decode(reply.ids)


def test_the_context_ends_a_reply_and_refuses_a_prompt(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    limit = context_length(tiny_olmoe)
    assert limit == 1024
    longest = {"input_ids": torch.randint(5, 4000, [1, limit - 1])}
    reply = Reply(tiny_tokenizer, str)
    stream_reply(tiny_olmoe, longest, reply, Sampling(max_new_tokens=9), pad_token=1)
    assert len(reply.ids) == room_after(tiny_olmoe, limit - 1) == 2
    with pytest.raises(ConfigError, match=r"has 1,025 tokens, and the model reads at most 1,024"):
        room_after(tiny_olmoe, limit + 1)
    tiny_olmoe.config.max_position_embeddings = 0  # it does not say
    try:
        assert room_after(tiny_olmoe, 10**6) > 10**6
    finally:
        tiny_olmoe.config.max_position_embeddings = limit
