"""Rows as public data sets have them, made into ours. Pure functions from mapping to mapping.

Where a data set names the right choice apart from the wrong ones, they are put in an order that
depends on the question alone: the same on every machine, and even over the letters.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence

from knn_moe.tasks.task import Row


def arc(row: Row) -> Row | None:
    """ARC, OpenBookQA and CommonsenseQA: choices with labels, and the right label."""
    question = row.get("question", row.get("question_stem"))
    choices = row["choices"]
    if row["answerKey"] not in choices["label"]:
        return None  # hidden
    answer = list(choices["label"]).index(row["answerKey"])
    return _choice(row, str(question), list(choices["text"]), answer)


def mmlu(row: Row) -> Row:
    made = _choice(row, row["question"], list(row["choices"]), int(row["answer"]))
    return {**made, "subject": row.get("subject", "")}


def medmcqa(row: Row) -> Row | None:
    if row["cop"] not in range(4):
        return None  # hidden
    choices = [row[name] for name in ("opa", "opb", "opc", "opd")]
    return {**_choice(row, row["question"], choices, row["cop"]), "subject": row["subject_name"]}


def medqa(row: Row) -> Row:
    letters = sorted(row["options"])
    answer = letters.index(row["answer_idx"])
    return _choice(row, row["question"], [row["options"][letter] for letter in letters], answer)


def supergpqa(row: Row) -> Row:
    answer = "ABCDEFGHIJ".index(row["answer_letter"])
    made = _choice(row, row["question"], list(row["options"]), answer)
    return {**made, "id": row["uuid"], "subject": row["subfield"]}


def gpqa(row: Row) -> Row:
    wrong = [row[f"Incorrect Answer {number}"] for number in (1, 2, 3)]
    made = _shuffled(row, row["Question"], row["Correct Answer"], wrong)
    return {**made, "id": row["Record ID"]}


def sciq(row: Row) -> Row:
    wrong = [row[f"distractor{number}"] for number in (1, 2, 3)]
    return _shuffled(row, row["question"], row["correct_answer"], wrong)


def piqa(row: Row) -> Row | None:
    if row["label"] not in (0, 1):
        return None  # hidden
    return _choice(row, row["goal"], [row["sol1"], row["sol2"]], row["label"])


def hellaswag(row: Row) -> Row | None:
    if str(row["label"]) not in "0123" or not str(row["label"]):
        return None  # hidden
    context = f"{row['activity_label']}: {row['ctx_a']} {str(row['ctx_b']).capitalize()}"
    endings = [tidy(ending) for ending in row["endings"]]
    return _choice(row, tidy(context), endings, int(row["label"]))


def tidy(text: str) -> str:
    """WikiHow's marks off, as is usual for HellaSwag."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\s+", " ", re.sub(r"\[.*?\]", "", text)).strip()


def boolq(row: Row) -> Row:
    """Closed book: without its passage, as in our files."""
    question = row["question"].strip().capitalize()
    if not question.endswith("?"):
        question += "?"
    return _choice(row, question, ["true", "false"], 0 if row["answer"] else 1)


def gsm8k(row: Row) -> Row:
    solution, _, answer = row["answer"].partition("####")
    solution = re.sub(r"<<.*?>>", "", solution).strip()
    answer = answer.strip().replace(",", "")
    return {"question": row["question"], "solution": solution, "answer": answer}


def mbpp(row: Row) -> Row:
    return {
        "task_id": row["task_id"],
        "prompt": row["text"],
        "code": row["code"],
        "tests": list(row["test_list"]),
        "setup": row.get("test_setup_code", ""),
    }


def humaneval(row: Row) -> Row:
    return {
        "task_id": row["task_id"],
        "prompt": row["prompt"],
        "code": row["canonical_solution"],
        "tests": [row["test"]],
        "entry_point": row["entry_point"],
    }


def _choice(row: Row, question: str, choices: list[str], answer: int) -> Row:
    made = {"question": question, "choices": choices, "answer": answer}
    return {"id": row["id"], **made} if row.get("id") else made


def _shuffled(row: Row, question: str, right: str, wrong: Sequence[str]) -> Row:
    choices = [right, *wrong]
    seed = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")
    random.Random(seed).shuffle(choices)
    return _choice(row, question, choices, choices.index(right))
