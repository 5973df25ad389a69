"""The tokens that examples become."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizer

from helpers.zoo import make_texts
from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, Tokens, tokenise

CHAT = [{"role": "user", "content": "5 6"}, {"role": "assistant", "content": "7 8"}]

# user is 101, assistant 102; every turn ends in 100
TEMPLATE = (
    "{% for message in messages %}{{ '101' if message.role == 'user' else '102' }} "
    "{{ message.content }} 100 {% endfor %}{% if add_generation_prompt %}102{% endif %}"
)


class SlowTokenizer(PreTrainedTokenizer):
    """Numbers, as the fixture's, in pure Python; `ending` is a token put after every text."""

    def __init__(self, ending: int | None = None) -> None:
        self.ending = ending
        super().__init__()

    @property
    def vocab_size(self) -> int:
        return 128

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(128)}

    def _tokenize(self, text: str) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return int(token)

    def _convert_id_to_token(self, index: int) -> str:
        return str(index)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [*token_ids_0, *([] if self.ending is None else [self.ending])]


@pytest.fixture
def chat_tokenizer(zoo_tokenizer: Any) -> Any:
    own = copy.deepcopy(zoo_tokenizer)
    own.chat_template = TEMPLATE
    return own


@pytest.fixture
def framed_tokenizer(zoo_tokenizer: Any) -> Any:
    """Puts 1 before and 2 after every text, as many models' tokenizers do."""
    own = copy.deepcopy(zoo_tokenizer)
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="1 $A 2", special_tokens=[("1", 1), ("2", 2)]
    )
    return own


def test_a_plain_text_is_tokenised_as_it_is(zoo_tokenizer: Any, framed_tokenizer: Any) -> None:
    for each in (zoo_tokenizer, framed_tokenizer):
        for text in make_texts(3):
            assert tokenise(Example.of(text), each) == Tokens(each(text)["input_ids"], 0)


@pytest.mark.parametrize(
    ("prompt", "completion", "ids", "start"),
    [
        ("5 6", " 7 8", [5, 6, 7, 8], 2),
        ("5 6 ", "7 8", [5, 6, 7, 8], 2),
        ("5 1", "7 9", [5, 17, 9], 1),
        ("1", "7", [17], 0),
        ("5 6", "", [5, 6], 2),
        ("5 6", "  ", [5, 6], 2),
    ],
)
def test_a_prompt_and_completion_are_the_joined_text(
    prompt: str,
    completion: str,
    ids: list[int],
    start: int,
    zoo_tokenizer: Any,
    framed_tokenizer: Any,
) -> None:
    example = Example(prompt, completion)
    assert tokenise(example, zoo_tokenizer) == Tokens(ids, start)
    framed = tokenise(example, framed_tokenizer)
    assert framed.ids == [1, *ids, 2]
    assert framed.completion_start == (start + 1 if start < len(ids) else len(framed.ids))


def test_a_slow_tokenizer() -> None:
    slow = SlowTokenizer()
    assert not slow.is_fast
    assert tokenise(Example.of("5 6 7"), slow) == Tokens([5, 6, 7], 0)
    assert tokenise(Example("5 6", " 7 8"), slow) == Tokens([5, 6, 7, 8], 2)


def test_a_slow_tokenizer_with_a_straddling_token() -> None:
    assert tokenise(Example("5 1", "7 9"), SlowTokenizer()) == Tokens([5, 17, 9], 1)


def test_a_slow_tokenizer_with_an_end_token() -> None:
    assert tokenise(Example("5 6", " 7 8"), SlowTokenizer(ending=2)) == Tokens([5, 6, 7, 8, 2], 2)


def test_the_last_assistant_turn_is_the_completion(chat_tokenizer: Any) -> None:
    longer = [*CHAT, {"role": "user", "content": "9"}, {"role": "assistant", "content": "3"}]
    assert tokenise(Example.of(CHAT), chat_tokenizer) == Tokens([101, 5, 6, 100, 102, 7, 8, 100], 5)
    tokens = tokenise(Example.of(longer), chat_tokenizer)
    assert tokens.ids[tokens.completion_start :] == [3, 100]


def test_an_assistant_turn_alone_is_all_completion(chat_tokenizer: Any) -> None:
    assert tokenise(Example.of(CHAT[1:]), chat_tokenizer) == Tokens([102, 7, 8, 100], 0)


def test_a_generation_prompt_unlike_the_turn_ends_where_they_part(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = TEMPLATE.replace("%}102{%", "%}102 99 98{%")
    tokens = tokenise(Example.of(CHAT), chat_tokenizer)
    assert tokens.ids[tokens.completion_start :] == [7, 8, 100]


def test_a_message_without_text_is_refused(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = "{% for one in messages %}{{ one.content + '.' }}{% endfor %}"
    with pytest.raises(ReferenceSetError, match=r"template refused a conversation: .*None"):
        tokenise(Example.of([{"role": "user", "content": None}]), chat_tokenizer)


def test_messages_need_a_chat_template(zoo_tokenizer: Any) -> None:
    with pytest.raises(ReferenceSetError, match="no chat template"):
        tokenise(Example.of(CHAT), zoo_tokenizer)
