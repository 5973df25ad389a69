"""Rows of public data sets are converted, and each kind asks and judges its rows."""

from __future__ import annotations

from helpers.quiz import make_row
from knn_moe.tasks import Choice, allow_programs, rows
from knn_moe.tasks.kinds import Function, Number, Program
from knn_moe.tasks.task import LIKELIHOOD


def test_rows_of_public_data_sets_are_converted() -> None:
    labelled = {"text": ["x", "y"], "label": ["1", "2"]}
    arc = {"id": "a", "question": "Q", "choices": labelled, "answerKey": "2"}
    assert rows.arc(arc) == {"id": "a", "question": "Q", "choices": ["x", "y"], "answer": 1}
    assert rows.arc({**arc, "answerKey": ""}) is None
    boolq = rows.boolq({"question": "is it so", "answer": False})
    assert (boolq["question"], boolq["answer"]) == ("Is it so?", 1)
    solved = rows.gsm8k({"question": "Q", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"})
    assert (solved["solution"], solved["answer"]) == ("2 + 3 = 5", "1005")
    options = {"B": "b", "A": "a"}
    medqa = rows.medqa({"question": "Q", "options": options, "answer_idx": "B"})
    assert (medqa["choices"], medqa["answer"]) == (["a", "b"], 1)
    swag = {"activity_label": "Cooking", "ctx_a": "A man.", "ctx_b": "he [title] turns",
            "endings": ["away. [step] x", "b", "c", "d"], "label": "2"}  # fmt: skip
    made = rows.hellaswag(swag)
    assert made is not None
    assert made["question"] == "Cooking: A man. He. turns"
    assert made["choices"][0] == "away. x"
    assert rows.hellaswag({**swag, "label": ""}) is None


def test_choices_are_shuffled_evenly_and_always_alike() -> None:
    answers = []
    for number in range(200):
        row = {"question": f"Q{number}", "correct_answer": "right"}
        row |= {f"distractor{n}": f"wrong {n}" for n in (1, 2, 3)}
        made = rows.sciq(row)
        assert made["choices"][made["answer"]] == "right"
        assert made == rows.sciq(row)
        answers.append(made["answer"])
    assert all(30 <= answers.count(place) <= 70 for place in range(4))


def test_kinds_ask_and_judge() -> None:
    row = make_row(1)
    kind = Choice(scorings=(LIKELIHOOD,))
    assert kind.judge("The correct answer is (B).", row).score == 1
    assert kind.judge("The correct answer is (A).", row).parsed == "A"
    assert kind.judge("I do not know", row).parsed is None
    options = kind.options(row)
    assert options.context.endswith("\nAnswer:")
    assert options.continuations == (" one", " two", " three")
    assert Choice(bare=True).options(row).context == row["question"]
    assert Number().judge("So the answer is 1,005.", {"answer": "1005"}).score == 1


def test_programs_are_judged_by_their_tests() -> None:
    program = {"prompt": "Add.", "tests": ["assert add(1, 2) == 3"]}
    right = "```python\ndef add(a, b):\n    return a + b\n```"
    with allow_programs():
        assert Program().judge(right, program).score == 1
        assert Program().judge(right.replace("+", "-"), program).score == 0
    function = {"prompt": "def add(a, b):\n", "entry_point": "add",
                "tests": ["def check(f):\n    assert f(1, 2) == 3"]}  # fmt: skip
    with allow_programs():
        assert Function().judge("    return a + b\n", function).score == 1
        assert Function().judge("    return a\n", function).score == 0
