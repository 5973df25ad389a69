"""Examples as users have them, the tokens they become, and what is said of those that cannot."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizer

from helpers.zoo import make_texts
from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, Tokens, iter_examples, load_examples, tokenise

CHAT = [{"role": "user", "content": "5 6"}, {"role": "assistant", "content": "7 8"}]
ROWS = [{"text": "3 4"}, {"prompt": "5 6", "completion": " 7"}, {"messages": CHAT}]
EXAMPLES = [Example("", "3 4"), Example("5 6", " 7"), Example(messages=tuple(CHAT))]

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


def write_lines(path: Path, lines: Iterable[object]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf8")
    return path


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("3 4", Example("", "3 4")),
        ({"text": "3 4", "id": 9}, Example("", "3 4")),
        ({"prompt": "5 6", "completion": " 7"}, Example("5 6", " 7")),
        ({"prompt": None, "completion": None, "text": "3"}, Example("", "3")),
        ({"messages": None, "text": "3"}, Example("", "3")),
        ({"messages": CHAT}, Example(messages=tuple(CHAT))),
        (CHAT, Example(messages=tuple(CHAT))),
        (Example("5", "6"), Example("5", "6")),
    ],
)
def test_every_form_of_example(item: Any, expected: Example) -> None:
    assert Example.of(item) == expected


@pytest.mark.parametrize("name", ["cases.jsonl", "cases.jsonl.gz"])
def test_json_lines(name: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / name, [*ROWS, "9 9", CHAT])
    expected = [*EXAMPLES, Example("", "9 9"), EXAMPLES[2]]
    assert load_examples(path) == expected
    assert load_examples(str(path)) == expected


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text('\n{"text": "3 4"}\n   \n\n{"text": "5"}')
    assert load_examples(path) == [Example("", "3 4"), Example("", "5")]


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text('{"text": "é\u2028\u0085ß"}\n', encoding="utf8")
    assert load_examples(path) == [Example("", "é\u2028\u0085ß")]


@pytest.mark.parametrize("name", ["case.txt", "case.md"])
def test_a_text_file_is_one_text(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("3 4\n\nß 5\n", encoding="utf8")
    assert load_examples(path) == [Example("", "3 4\n\nß 5\n")]


def test_a_datasets_object() -> None:
    for row, example in zip(ROWS, EXAMPLES, strict=True):
        assert load_examples(datasets.Dataset.from_list([row] * 3)) == [example] * 3
    columns = dict.fromkeys(["text", "prompt", "completion", "messages"])
    mixed = datasets.Dataset.from_list([columns | row for row in ROWS])
    assert load_examples(mixed) == EXAMPLES
    assert load_examples(mixed.to_iterable_dataset()) == EXAMPLES


def test_examples_come_one_at_a_time() -> None:
    endless = iter(lambda: "3 4", None)
    assert next(iter_examples(endless)) == Example("", "3 4")


def test_a_mapping_of_splits_is_refused() -> None:
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:1])})
    with pytest.raises(ReferenceSetError, match="train"):
        load_examples(splits)


def test_messages_must_not_be_a_text() -> None:
    with pytest.raises(ReferenceSetError):
        Example.of({"messages": "3 4"})


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


def test_messages_need_a_chat_template(zoo_tokenizer: Any) -> None:
    with pytest.raises(ReferenceSetError, match="no chat template"):
        tokenise(Example.of(CHAT), zoo_tokenizer)


def test_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ReferenceSetError, match=f"No file of examples at '{path}'"):
            load_examples(path)


@pytest.mark.parametrize("name", ["cases.jsonl", "cases.txt"])
@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_file(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ReferenceSetError, match=rf"{name}' holds no examples"):
        load_examples(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "3"', r"line 3: not JSON \("),
        (
            '{"question": "3", "answer": "4"}',
            r"line 3: needs .*; has 'question' \(str\), 'answer' \(str\)\.",
        ),
        ('{"prompt": "3"}', r"line 3: needs .*; has 'prompt' \(str\)\."),
        ("{}", r"line 3: needs .*; has nothing\."),
        ('{"text": 3}', r"line 3: needs .*; has 'text' \(int\)\."),
        ("17", r"line 3: must be .*; got int\."),
        ("[]", r"line 3: must be .*; got list\."),
        ('[{"role": "user"}]', r"line 3: must be .*; got list\."),
    ],
)
@pytest.mark.parametrize("name", ["cases.jsonl", "cases.jsonl.gz"])
def test_a_wrong_line_is_named(line: str, message: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    content = f'{{"text": "3"}}\n\n{line}\n'.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    with pytest.raises(ReferenceSetError, match=rf"{name}, {message}"):
        load_examples(path)


def test_a_wrong_item_is_numbered() -> None:
    with pytest.raises(ReferenceSetError, match=r"^Example 1 needs .*; has 'body' \(str\)\.$"):
        load_examples(["3 4", {"body": "5"}])


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "cases.jsonl.gz", [{"text": text} for text in make_texts(50)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ReferenceSetError, match=r"Cannot read .*cases"):
        load_examples(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("cases.jsonl.gz", b"plain"), ("cases.jsonl", b'{"text": "\xff"}'), ("case.txt", b"\xff")],
)
def test_a_file_that_is_not_what_it_says(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ReferenceSetError, match=rf"Cannot read .*{name}"):
        load_examples(path)


@pytest.mark.parametrize("name", ["cases.csv", "cases", "cases.json", "cases.txt.gz"])
def test_an_unknown_suffix(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("3 4")
    with pytest.raises(ReferenceSetError, match=rf"{name}' holds. Use .jsonl"):
        load_examples(path)
