"""What requests ask, and how each wrong field is refused: by its name, in one sentence."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knn_moe.serve.refused import RefusedError
from knn_moe.serve.requests import parse_request

CHAT = {"model": "law", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "law", "prompt": "Hi"}


def test_what_is_not_said() -> None:
    chat, text = parse_request(CHAT, chat=True), parse_request(TEXT, chat=False)
    assert chat.prompts == ([{"role": "user", "content": "Hi"}],)
    assert text.prompts == ("Hi",)
    for asked in (chat, text):
        assert (asked.model, asked.n, asked.max_tokens, asked.stops) == ("law", 1, None, ())
        assert (asked.sampling.temperature, asked.sampling.top_p) == (1.0, 1.0)
        assert (asked.sampling.seed, asked.sampling.logprobs, asked.stream) == (None, None, False)


def test_what_is_said() -> None:
    body = {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "n": 2,
        "seed": -1,
        "stop": ["a", "b"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "somebody",
        "frequency_penalty": 0,
        "tools": None,
        "logit_bias": {},
    }
    asked = parse_request({**TEXT, **body, "prompt": [[1, 2], [3]], "logprobs": 0}, chat=False)
    assert asked.prompts == ([1, 2], [3])
    assert (asked.max_tokens, asked.n, asked.choices, asked.stops) == (5, 2, 4, ("a", "b"))
    assert (asked.sampling.temperature, asked.sampling.seed, asked.sampling.logprobs) == (0, -1, 0)
    assert asked.include_usage
    chat = parse_request(
        {**CHAT, **body, "max_completion_tokens": 7, "logprobs": True, "top_logprobs": 3}, chat=True
    )
    assert (chat.max_tokens, chat.sampling.logprobs) == (7, 3)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = parse_request({**CHAT, "messages": [{"role": "user", "content": parts}]}, chat=True)
    assert joined.prompts == ([{"role": "user", "content": "ab"}],)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "must be a text"),
    ({"model": "\ud800"}, "model", "half of a character"),
    ({"prompt": None}, "prompt", "must be a text or a list"),
    ({"prompt": []}, "prompt", "must be a text or a list"),
    ({"prompt": [True]}, "prompt", "must be a text or a list"),
    ({"prompt": ["a", 1]}, "prompt", "must be a text or a list"),
    ({"prompt": "\ud800"}, "prompt", "half of a character"),
    ({"prompt": ["a"] * 65, "n": 2}, "n", "130 answers, and 128 is the most"),
    ({"max_tokens": 0}, "max_tokens", "whole number from 1"),
    ({"max_tokens": 1.5}, "max_tokens", "whole number"),
    ({"max_tokens": True}, "max_tokens", "whole number"),
    ({"max_tokens": 10**400}, "max_tokens", "whole number"),
    ({"temperature": -1}, "temperature", "from 0 to 2"),
    ({"temperature": float("nan")}, "temperature", "from 0 to 2"),
    ({"temperature": 10**400}, "temperature", "from 0 to 2"),
    ({"top_p": "1"}, "top_p", "from 0 to 1"),
    ({"n": 129}, "n", "from 1 to 128"),
    ({"seed": 1 << 63}, "seed", "whole number"),
    ({"stop": ""}, "stop", "none empty"),
    ({"stop": [1]}, "stop", "none empty"),
    ({"stop": {}}, "stop", "none empty"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"stream": 1}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs 'stream'"),
    ({"stream": True, "stream_options": 1}, "stream_options", "JSON object"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "Unknown field"),
    ({"best_of": 2}, "best_of", "does not support"),
    ({"echo": True}, "echo", "does not support"),
    ({"presence_penalty": 1}, "presence_penalty", "does not support"),
    ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
    ({"x" * 1000: 1}, "x", "Leave it out"),
]
WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": "Hi"}, "messages", "list of at least one"),
    ({"messages": []}, "messages", "list of at least one"),
    ({"messages": ["Hi"]}, "messages[0]", "JSON object"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0]", "role of messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "must be a text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "mess",
        "reads text only",
    ),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages[0]", "half of a character"),
    ({"messages": [{"role": "user", "content": "", "tool_calls": [1]}]}, "mess", "'tool_calls'"),
    ({"tools": [{}]}, "tools", "does not support"),
    ({"response_format": {"type": "json_object"}}, "response_format", "does not support"),
    ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
    ({"logprobs": 2}, "logprobs", "true or false"),
    ({"prompt": "Hi"}, "prompt", "Unknown field"),
]


@pytest.mark.parametrize(
    ("change", "param", "words", "chat"),
    [(*each, False) for each in WRONG] + [(*each, True) for each in WRONG_CHATS],
)
def test_wrong_fields_are_refused_by_name(
    change: dict[str, Any], param: str, words: str, chat: bool
) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_request({**(CHAT if chat else TEXT), **change}, chat=chat)
    error = caught.value.to_dict()["error"]
    assert error["param"].startswith(param)
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert caught.value.status == 400
    assert len(error["message"]) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = st.sampled_from([*CHAT, *TEXT, "n", "stop", "stream", "logprobs", "seed", "temperature"])


@settings(deadline=None)
@given(JSON | st.dictionaries(FIELDS, JSON), st.booleans())
def test_any_json_is_parsed_or_refused(body: Any, chat: bool) -> None:
    with suppress(RefusedError):
        parse_request(body, chat=chat)
