"""What the model reads of a conversation, and what goes when it is too long."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from knn_moe.chat.conversation import Conversation, Turn
from knn_moe.errors import ConfigError

TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}</{{ one.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = "{{ raise_exception('Only one message, please') if messages|length > 1 }}" + TEMPLATE
TURNS = [Turn(f"question {number}", f" answer {number}") for number in range(4)]


def talk(tokenizer: Any, template: str | None = None) -> Conversation:
    talking = copy.deepcopy(tokenizer)
    talking.chat_template = template
    return Conversation(talking, list(TURNS))


def read(conversation: Conversation, message: str, limit: int | None = None, free: int = 0) -> str:
    ids = conversation.prompt(message, limit, free).inputs["input_ids"][0]
    text: str = conversation.tokenizer.decode(ids)
    return text


def test_the_template_is_used(tiny_tokenizer: Any) -> None:
    conversation = talk(tiny_tokenizer, TEMPLATE)
    text = read(conversation, "and now?")
    assert text.startswith("<user>question 0</user><assistant> answer 0</assistant><user>")
    assert text.endswith("<assistant> answer 3</assistant><user>and now?</user><assistant>")
    assert conversation.turns == TURNS  # the message becomes a turn with its reply


def test_without_a_template_the_text_is_continued(tiny_tokenizer: Any) -> None:
    conversation = talk(tiny_tokenizer)
    conversation.turns = TURNS[:2]
    assert read(conversation, "Now") == "question 0 answer 0\nquestion 1 answer 1\nNow"


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_the_oldest_turns_go_first(tiny_tokenizer: Any, template: str | None) -> None:
    full = talk(tiny_tokenizer, template).prompt("now", None, 0).tokens
    assert talk(tiny_tokenizer, template).prompt("now", full, 0).dropped == 0
    conversation = talk(tiny_tokenizer, template)
    assert conversation.prompt("now", full, 1).dropped == 1
    assert conversation.turns == TURNS[1:]
    assert "question 0" not in read(conversation, "now")
    assert conversation.prompt("now", 40, 10**6).dropped == 3  # nothing is left to drop
    assert conversation.turns == []


def test_what_the_model_cannot_read(tiny_tokenizer: Any) -> None:
    conversation = talk(tiny_tokenizer)
    with pytest.raises(ConfigError, match="message has 20 tokens, and the model reads at most 19"):
        conversation.prompt(" a" * 20, 19, 0)
    assert conversation.turns == TURNS
    with pytest.raises(ConfigError, match="template refuses this: Only one message, please"):
        talk(tiny_tokenizer, STRICT).prompt("now", None, 0)
