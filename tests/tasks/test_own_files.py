"""Files of one's own: questions and texts of every format, and answers however they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from helpers.quiz import make_questions, make_row
from knn_moe.errors import TaskDataError, TaskError
from knn_moe.tasks import Choice, Text, open_task
from knn_moe.tasks.kinds import Number, Program

QUESTIONS = [make_row(number, answer=number % 3) for number in range(5)]
ARC = {"text": ["x", "y"], "label": ["1", "2"]}


def lettered() -> pandas.DataFrame:
    """QUESTIONS as people have them in a spreadsheet: columns A to D, and a letter."""
    rows = [
        {
            "id": row["id"],
            "question": row["question"],
            **dict(zip("ABC", row["choices"], strict=True)),
        }
        | {"D": None, "answer": "ABC"[row["answer"]]}
        for row in QUESTIONS
    ]
    return pandas.DataFrame(rows)


def test_questions_of_every_format(tmp_path: Path) -> None:
    table = lettered()
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_csv(tmp_path / "b.tsv.gz", index=False, sep="\t")
    table.to_csv(tmp_path / "c.csv", index=False, encoding="utf-8-sig", lineterminator="\r\n")
    table.to_json(tmp_path / "d.json", orient="records")
    table.to_json(tmp_path / "e.jsonl", orient="records", lines=True)
    table.to_parquet(tmp_path / "f.parquet")
    pandas.DataFrame(QUESTIONS).to_parquet(tmp_path / "g.parquet")
    cells = [{**row, "choices": json.dumps(row["choices"])} for row in QUESTIONS]
    pandas.DataFrame(cells).to_csv(tmp_path / "h.csv", index=False)
    for path in sorted(tmp_path.iterdir()):
        data = open_task(str(path))
        assert (data.task.name, data.task.kind) == (path.name[0], Choice())
        for row, expected in zip(data.test, QUESTIONS, strict=True):
            assert {name: row[name] for name in expected} == expected, path.name


def open_questions(tmp_path: Path, *questions: dict[str, Any]) -> list[Any]:
    rows = [make_row(number) | question for number, question in enumerate(questions)]
    path = tmp_path / "quiz.json"
    path.write_text(json.dumps(rows), encoding="utf8")
    return [row["answer"] for row in open_task(str(path)).test]


@pytest.mark.parametrize(
    ("questions", "answers"),
    [
        # an index stays as it is, also where the choices are digits
        ([{"answer": 2}, {"choices": ["1", "0"], "answer": 1}], [2, 1]),
        ([{"answer": "C"}, {"answer": "(b)"}, {"answer": "a."}], [2, 1, 0]),
        ([{"answer": "two"}, {"answer": " three "}], [1, 2]),
        ([{"answer": "2"}, {"answer": "0"}], [2, 0]),
        ([{"answer": "two"}, {"answer": "A"}, {"answer": 1}], [1, 0, 1]),
        # choices that are letters: the answers of other rows tell how an answer is meant
        ([{"choices": ["A", "B"], "answer": "B"}], [1]),
        ([{"choices": ["B", "A"], "answer": "A"}, {"answer": "C"}], [0, 2]),
        ([{"choices": ["B", "A"], "answer": "A"}, {"answer": "two"}], [1, 1]),
        # choices that are digits, likewise
        ([{"choices": ["1", "2"], "answer": "1"}, {"answer": "0"}], [1, 0]),
        ([{"choices": ["1", "2"], "answer": "1"}, {"choices": ["5", "9"], "answer": "9"}], [0, 1]),
        # choices with labels
        ([{"choices": {"A": "x", "B": "y"}, "answer": "B"}], [1]),
        ([{"options": {"B": "y", "A": "x"}, "choices": None, "answer": "y"}], [1]),
        ([{"choices": ARC, "answerKey": "1", "answer": None}], [0]),
        ([{"choices": ARC, "answer": 2}], [1]),
    ],
)  # fmt: skip
def test_an_answer_is_an_index_a_letter_or_a_text(
    questions: list[dict[str, Any]], answers: list[int], tmp_path: Path
) -> None:
    assert open_questions(tmp_path, *questions) == answers


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"choices": ["B", "A"], "answer": "A"}, r"could mean several of the choices \['B', 'A'\]"),
        ({"choices": ["1", "2"], "answer": "1"}, "Row q0 of quiz.json has the answer '1', which"),
        ({"choices": {"A": "B", "B": "A"}, "answer": "A"}, "could mean several"),
        ({"answer": "four"}, "which is none of the choices"),
        ({"answer": "3"}, "which is none of the choices"),
        ({"answer": ""}, "which is none of the choices"),
        ({"answer": 3}, "as a number from 0 to 2, has 3"),
        ({"answer": -1}, "as a number from 0 to 2, has -1"),
        ({"answer": True}, "has True"),
        ({"choices": [3, 4], "answer": 1}, 'needs a "question" and a list of "choices"'),
        ({"choices": {"text": ["x"], "label": ["A", "B"]}, "answer": "A"}, 'a list of "choices"'),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_certain_is_refused(
    question: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskDataError, match=message):
        open_questions(tmp_path, question)


def test_numbers_and_programs_from_a_table(tmp_path: Path) -> None:
    sums = tmp_path / "sums.csv"
    sums.write_text("question,answer\n2 + 2?,4\n", encoding="utf8")
    data = open_task(str(sums))
    assert (data.task.kind, data.test) == (Number(), [{"question": "2 + 2?", "answer": "4"}])
    pandas.DataFrame({"question": ["2 + 2?"], "answer": [4]}).to_parquet(tmp_path / "sums.parquet")
    assert open_task(str(tmp_path / "sums.parquet")).test == data.test
    code = tmp_path / "code.tsv"
    code.write_text('prompt\tcode\ttests\nAdd.\tx = 1\t"[""assert x""]"\n', encoding="utf8")
    data = open_task(str(code))
    assert (data.task.kind, data.test[0]["tests"]) == (Program(), ["assert x"])


def test_a_text_is_read_by_its_paragraphs(tmp_path: Path) -> None:
    text = (
        "Title\n\nA first one that has\nenough letters.\n\nNow a second one, with as many as that."
    )
    path = tmp_path / "book_test.txt"
    path.write_text(text, encoding="utf-16")
    data = open_task(str(path))
    assert (data.task.name, data.task.kind, len(data.test)) == ("book", Text(), 2)
    assert "".join(row["text"] for row in data.test) == f"{text}\n\n"
    beside = tmp_path / "book_ref.md"
    beside.write_text("# Title\n\nAnother paragraph, not in the test.", encoding="utf8")
    assert len(open_task(str(path)).reference) == 1
    # a short paragraph belongs to the next
    beside.write_text("Preface\n\nNow a second one,\nwith as many as that!", encoding="utf8")
    assert len(open_task(str(path)).reference) == 1
    beside.write_text("Now a second one,\nwith as many as that!", encoding="utf8")
    with pytest.raises(TaskDataError, match=r"1 rows of book_ref\.md are in the test set too"):
        open_task(str(path))


def test_the_reference_set_beside_a_file_may_have_another_format(tmp_path: Path) -> None:
    test, reference = make_questions(8)[:4], make_questions(8)[4:]
    (tmp_path / "quiz.json").write_text(json.dumps(test), encoding="utf8")
    lines = "".join(json.dumps(row) + "\n" for row in reference)
    (tmp_path / "quiz_ref.jsonl").write_text(lines, encoding="utf8")
    data = open_task(str(tmp_path / "quiz.json"))
    assert (data.test, data.reference) == (test, reference)
    (tmp_path / "quiz_ref.json").write_text(json.dumps(reference), encoding="utf8")
    with pytest.raises(TaskError, match=r"could be quiz_ref\.json or quiz_ref\.jsonl\. Keep one"):
        open_task(str(tmp_path / "quiz.json"))
