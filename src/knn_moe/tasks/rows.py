"""Convert the rows of public data sets to ours. Pure functions from mapping to mapping.

Some data sets name the right choice apart from the wrong ones. These choices are put in an order
that depends on the question only: the same on every machine, and even over the letters. A row
whose answer is hidden gives None.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence

from knn_moe.tasks.task import Row


def arc(row: Row) -> Row | None:
    """Convert ARC, OpenBookQA and CommonsenseQA: labelled choices, and the right label."""
    question = row.get("question", row.get("question_stem"))
    choices = row["choices"]
    if row["answerKey"] not in choices["label"]:
        return None
    answer = list(choices["label"]).index(row["answerKey"])
    return _choice_row(row, str(question), list(choices["text"]), answer)


def mmlu(row: Row) -> Row:
    converted = _choice_row(row, row["question"], list(row["choices"]), int(row["answer"]))
    return {**converted, "subject": row.get("subject", "")}


def medmcqa(row: Row) -> Row | None:
    if row["cop"] not in range(4):
        return None
    choices = [row[name] for name in ("opa", "opb", "opc", "opd")]
    converted = _choice_row(row, row["question"], choices, row["cop"])
    return {**converted, "subject": row["subject_name"]}


def medqa(row: Row) -> Row:
    letters = sorted(row["options"])
    answer = letters.index(row["answer_idx"])
    return _choice_row(row, row["question"], [row["options"][letter] for letter in letters], answer)


def supergpqa(row: Row) -> Row:
    answer = "ABCDEFGHIJ".index(row["answer_letter"])
    converted = _choice_row(row, row["question"], list(row["options"]), answer)
    return {**converted, "id": row["uuid"], "subject": row["subfield"]}


def gpqa(row: Row) -> Row:
    wrong = [row[f"Incorrect Answer {number}"] for number in (1, 2, 3)]
    converted = _shuffle_choices(row, row["Question"], row["Correct Answer"], wrong)
    return {**converted, "id": row["Record ID"]}


def sciq(row: Row) -> Row:
    wrong = [row[f"distractor{number}"] for number in (1, 2, 3)]
    return _shuffle_choices(row, row["question"], row["correct_answer"], wrong)


def piqa(row: Row) -> Row | None:
    if row["label"] not in (0, 1):
        return None
    return _choice_row(row, row["goal"], [row["sol1"], row["sol2"]], row["label"])


def hellaswag(row: Row) -> Row | None:
    if str(row["label"]) not in "0123" or not str(row["label"]):
        return None
    context = f"{row['activity_label']}: {row['ctx_a']} {str(row['ctx_b']).capitalize()}"
    endings = [_strip_markup(ending) for ending in row["endings"]]
    return _choice_row(row, _strip_markup(context), endings, int(row["label"]))


def _strip_markup(text: str) -> str:
    """Remove WikiHow's markup, as is usual for HellaSwag."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\s+", " ", re.sub(r"\[.*?\]", "", text)).strip()


def boolq(row: Row) -> Row:
    """Convert BoolQ to a closed-book question: without its passage."""
    question = row["question"].strip().capitalize()
    if not question.endswith("?"):
        question += "?"
    return _choice_row(row, question, ["true", "false"], 0 if row["answer"] else 1)


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


def gsm8k_text(row: Row) -> Row:
    """Convert a local row of GSM8K to text: the question and its solution."""
    return {"text": f"{row['question']}\n{row['solution']}\nThe answer is {row['answer']}.\n\n"}


def mbpp_text(row: Row) -> Row:
    """Convert a local row of MBPP to text: the task, its program and its tests."""
    tests = "\n".join(row["tests"])
    return {"text": f"# {row['prompt'].strip()}\n{row['code'].strip()}\n\n{tests}\n\n"}


def hellaswag_text(row: Row) -> Row:
    """Convert a local row of HellaSwag to text: the context and its right ending."""
    return {"text": f"{row['question']} {row['choices'][row['answer']]}\n\n"}


def _choice_row(row: Row, question: str, choices: list[str], answer: int) -> Row:
    converted = {"question": question, "choices": choices, "answer": answer}
    return {"id": row["id"], **converted} if row.get("id") else converted


def _shuffle_choices(row: Row, question: str, right: str, wrong: Sequence[str]) -> Row:
    choices = [right, *wrong]
    seed = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")
    random.Random(seed).shuffle(choices)
    return _choice_row(row, question, choices, choices.index(right))
