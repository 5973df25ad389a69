"""Rows in the forms that data sets have, and what is said of rows in no known form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example
from knn_moe.reference.load import load_examples
from knn_moe.reference.quiz import read_answer

CHAT = [{"role": "user", "content": "5 6"}, {"role": "assistant", "content": "7 8"}]
TURNS = [{"from": "human", "value": "5 6"}, {"from": "gpt", "value": "7 8"}]
TALK = Example(messages=tuple(CHAT))
WITH_INPUT = "### Instruction:\nAdd.\n\n### Input:\n2 3\n\n### Response:\n"
QUIZ = {"question": "2 + 2?", "choices": ["3", "4", "5"]}
ANSWERED = Example("Question: 2 + 2?\nAnswer:", " 4", distractors=(" 3", " 5"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("3 4", Example("", "3 4")),
        ({"text": "3 4", "id": 9}, Example("", "3 4")),
        ({"prompt": "5 6", "completion": " 7"}, Example("5 6", " 7")),
        ({"prompt": None, "completion": None, "text": "3"}, Example("", "3")),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, TALK),
        ({"messages": None, "text": "3"}, Example("", "3")),
        ({"messages": CHAT}, TALK),
        (CHAT, TALK),
        ({"conversations": TURNS}, TALK),
        ({"conversations": CHAT, "id": "x"}, TALK),
        (TURNS, TALK),
        ({"prompt": "5 6", "response": "7"}, Example("5 6\n", "7")),
        ({"prompt": "5 6 ", "response": "7"}, Example("5 6 ", "7")),
        ({"prompt": "5 6", "response": "\n7"}, Example("5 6", "\n7")),
        ({"instruction": "Add.", "input": "2 3", "output": "5"}, Example(WITH_INPUT, "5")),
        (
            {"instruction": "Add.", "input": "", "output": "5", "text": "Below …"},
            Example("### Instruction:\nAdd.\n\n### Response:\n", "5"),
        ),
        ({"question": "Why?", "answer": "So."}, Example("Question: Why?\nAnswer:", " So.")),
        ({**QUIZ, "answer": 1}, ANSWERED),
        ({**QUIZ, "answer": "(b)"}, ANSWERED),
        ({**QUIZ, "answer": "4"}, ANSWERED),
        ({"question": "2 + 2?", "A": "3", "B": "4", "C": "5", "D": "", "answer": "B"}, ANSWERED),
        (Example("5", "6"), Example("5", "6")),
        # cells of a table
        ({"messages": json.dumps(CHAT)}, TALK),
        ({"conversations": str(TURNS)}, TALK),
        ({**QUIZ, "choices": "['3', '4', '5']", "answer": "B"}, ANSWERED),
        (
            {"prompt": "5", "completion": "6", "distractors": '["7"]'},
            Example("5", "6", distractors=("7",)),
        ),
        ({"text": "[3, 4]"}, Example("", "[3, 4]")),
        ({"question": "", "answer": "", "text": "3"}, Example("", "3")),
    ],
)
def test_every_form_of_row(row: Any, expected: Example) -> None:
    assert load_examples([row]) == [expected]


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"body": "3"}, {"text": "body"}, Example("", "3")),
        ({"text": "3", "body": "4"}, {"text": "body"}, Example("", "4")),
        ({"prompt": "1", "completion": "2", "body": "4"}, {"text": "body"}, Example("", "4")),
        ({"q": "1", "completion": "2"}, {"prompt": "q"}, Example("1", "2")),
        ({"text": "1", "out": "2"}, {"prompt": "text", "completion": "out"}, Example("1", "2")),
        ({"talk": TURNS}, {"messages": "talk"}, TALK),
        ({"q": "2 + 2?", "options": ["3", "4", "5"], "key": "B"},
         {"question": "q", "choices": "options", "answer": "key"}, ANSWERED),
    ],
)  # fmt: skip
def test_columns_may_have_other_names(row: Any, columns: dict[str, str], expected: Example) -> None:
    assert load_examples([row], columns=columns) == [expected]


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"body": "5", "id": 1}, {}, r"needs .* prompt and completion; .*; has 'body' \(str\), "
         r"'id' \(int\)\. Say which column is which with --column text=NAME"),
        ({"messages": "3 4"}, {}, r"has 'messages' \(str\)"),
        ({"text": 3}, {}, r"has 'text' \(int\)"),
        ({}, {}, "has nothing"),
        ({"prompt": "3"}, {}, r"has 'prompt' \(str\)"),
        ({"conversations": [{"from": "tool", "value": "3"}]}, {}, "has a turn from 'tool'"),
        ({"conversations": [{"from": ["gpt"], "value": "3"}]}, {}, r"has a turn from \['gpt'\]"),
        ({**QUIZ, "answer": "D"}, {}, "has the answer 'D', which is none of the choices"),
        ({**QUIZ, "choices": ["B", "A"], "answer": "A"}, {}, "which could mean several of"),
        ({**QUIZ, "answer": 3}, {}, "is none of the choices"),
        ({**QUIZ, "choices": [3, 4], "answer": "B"}, {}, r"needs .* has .*'choices' \(list\)"),
        (17, {}, "must be .* got int"),
        ([], {}, "must be .* got list"),
        ([{"role": "user"}], {}, "must be .* got list"),
        ({"text": "3"}, {"text": "body"}, r"has no column 'body'; has 'text' \(str\)"),
        ({"text": "3", "body": None}, {"text": "body"}, "needs"),
        ("3 4", {"text": "body"}, "must have columns, because some were named; it is a str"),
    ],
)  # fmt: skip
def test_a_row_of_no_form_is_described(row: Any, columns: dict[str, str], message: str) -> None:
    first = "0 0" if not columns else dict.fromkeys([*columns, *columns.values()], "0")
    with pytest.raises(ReferenceSetError, match=rf"^Example 1: .*{message}") as caught:
        load_examples([first, row], columns=columns)
    assert str(caught.value).endswith(".")


def test_columns_that_are_no_mapping_are_refused() -> None:
    columns: Any = "text"
    with pytest.raises(ReferenceSetError, match=r"columns must be a mapping, .* got 'text'"):
        load_examples([{"body": "3"}], columns=columns)


def test_a_field_that_no_form_has_is_refused() -> None:
    with pytest.raises(ReferenceSetError, match=r"no field 'txet'\. Did you mean 'text'\? Known: "):
        load_examples([{"body": "3"}], columns={"txet": "body"})


@pytest.mark.parametrize(
    ("choices", "answer", "ways"),
    [
        (["x", "y"], 1, {"index": 1}),
        (["x", "y"], 2, {}),
        (["x", "y"], -1, {}),
        (["x", "y"], True, {}),
        (["x", "y"], None, {}),
        (["x", "y"], 1.0, {}),
        (["x", "y"], "y", {"text": 1}),
        (["x ", "y"], " x", {"text": 0}),
        (["x", "y"], "B", {"letter": 1}),
        (["x", "y"], "b", {"letter": 1}),
        (["x", "y"], "(B)", {"letter": 1}),
        (["x", "y"], "b).", {"letter": 1}),
        (["x", "y"], "C", {}),
        (["x", "y"], "1", {"index": 1}),
        (["A", "B"], "B", {"text": 1, "letter": 1}),
        (["B", "A"], "B", {"text": 0, "letter": 1}),
        (["1", "2"], "1", {"text": 0, "index": 1}),
        (["x", "y"], "Banana", {}),
        (["x", "y"], "²", {}),
    ],
)
def test_the_ways_to_name_a_choice(choices: list[str], answer: Any, ways: dict[str, int]) -> None:
    assert read_answer({"choices": choices, "answer": answer}) == ways
