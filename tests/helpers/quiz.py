"""Made-up multiple-choice questions for tests that ask a model something."""

from __future__ import annotations

from typing import Any

import torch

from knn_moe.tasks import Choice, Task, TaskData

WORDS = "a stone the river some bread green light one mountain two birds rain".split()  # noqa: SIM905


def make_questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of the kind Choice; the same seed gives the same questions."""
    generator = torch.Generator().manual_seed(seed)

    def draw_words(number: int) -> str:
        chosen = torch.randint(len(WORDS), (number,), generator=generator)
        return " ".join(WORDS[place] for place in chosen)

    rows = []
    for number in range(count):
        length, width = (int(torch.randint(2, top, (1,), generator=generator)) for top in (9, 6))
        choices = [f"{draw_words(1 + place % 3)} {place}" for place in range(width)]
        question = f"Question number {number} of set {seed}: {draw_words(length)}?"
        answer = number % width
        rows.append(
            {"id": f"{seed}-{number}", "question": question, "choices": choices, "answer": answer}
        )
    return rows


def make_row(number: int, **changes: Any) -> dict[str, Any]:
    """Return a row of the kind Choice, long enough to be told from others by its question."""
    text = f"Which of these is number {number} in the list of all the things there are?"
    row = {"id": f"q{number}", "question": text, "choices": ["one", "two", "three"], "answer": 1}
    return row | changes


def make_quiz(test: int = 18, reference: int = 6) -> TaskData:
    """Return a multiple-choice task of so many test and reference questions."""
    task = Task(name="quiz", title="Quiz", kind=Choice(), files="quiz")
    return TaskData(task, make_questions(test), make_questions(reference, seed=1), "made up")
