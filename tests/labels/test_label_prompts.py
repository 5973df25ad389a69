"""Prompts are loaded from files and iterables, and what is not a prompt is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest

from knn_moe.errors import ReferenceSetError
from knn_moe.labels.prompts import load_prompts


@pytest.mark.parametrize(
    ("item", "error"),
    [
        ({"prompt": "A", "completion": "B"}, "Prompt 1: has its 'completion' already"),
        ({"question": "A", "answer": "B"}, "Prompt 1: has its 'answer' already"),
        ({"text": "A"}, "needs no label"),
        ({"body": "A"}, r"needs one of .*prompt.*; has 'body' \(str\)\. Say .*--column prompt="),
        ("", "Prompt 1: is empty"),
        ([{"role": "assistant", "content": "A"}], "ends with an answer already"),
        (3, "must be a text or chat messages; got int"),
        ({"messages": "A"}, r"needs one of messages"),
        ({"prompt": "A\ud800"}, "Prompt 1: has half of a character"),
    ],
)
def test_items_that_are_not_prompts_are_refused(item: Any, error: str) -> None:
    with pytest.raises(ReferenceSetError, match=error):
        load_prompts(["A", item])


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("p.jsonl", "", "is empty"),
        ("p.jsonl", "{", "line 1: not JSON"),
        ("p.jsonl", '{"a": 1}', "line 1: needs"),
        ("p.csv", "a\nb\n", "line 2: needs one of"),
        ("p.pdf", "a", "Cannot tell what"),
        ("p.jsonl", None, "There is no file"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    name: str, text: str | None, error: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ReferenceSetError, match=error):
        load_prompts(tmp_path / name)


def test_a_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a b\n\nc\n")
    assert [prompt.text for prompt in load_prompts(path)] == ["a b", "c"]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "Who?", "completion": None}, "Who?"),
        ({"question": "Who?"}, "Question: Who?\nAnswer:"),
        ({"instruction": "Go."}, "### Instruction:\nGo.\n\n### Response:\n"),
        ({"conversations": [{"from": "human", "value": "Who?"}]}, "Who?"),
        ({"messages": '[{"role": "user", "content": "Who?"}]', "answer": ""}, "Who?"),
    ],
)
def test_rows_without_answers(row: dict[str, Any], text: str) -> None:
    assert [prompt.as_text() for prompt in load_prompts([row])] == [text]
    rows = pandas.DataFrame([{"Q": next(iter(row.values())), "answer": "It."}])
    columns = {next(iter(row)): "Q"}
    assert [prompt.as_text() for prompt in load_prompts(rows, columns)] == [text]
    with pytest.raises(ReferenceSetError, match=r"no field 'text'\. Known: messages, "):
        load_prompts(rows, {"text": "Q"})


def test_a_judge_reads_a_conversation_as_text() -> None:
    asked = {"role": "user", "content": "Who?"}
    single, long = load_prompts([[asked], [{"role": "system", "content": "Be brief."}, asked]])
    assert single.as_text() == "Who?"
    assert long.as_text() == "system: Be brief.\n\nuser: Who?"
