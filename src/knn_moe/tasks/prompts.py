"""The paper's prompts, word for word (appendix A), and prompts for the tasks it does not cover.

Text in, text out: knows nothing of models, chat templates or where questions come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from knn_moe.errors import ConfigError
from knn_moe.reference.quiz import LETTERS


@dataclass(frozen=True)
class Shot:
    """A solved example; `answer` is an index into `choices`."""

    question: str
    choices: Sequence[str]
    answer: int

    def __post_init__(self) -> None:
        if not 0 <= self.answer < len(self.choices):
            raise ConfigError(f"answer must be 0 to {len(self.choices) - 1}, got {self.answer}.")


def zero_shot(question: str, choices: Sequence[str]) -> str:
    """Return the zero-shot prompt of a multiple-choice question."""
    return (
        f"What is the correct answer to this question: {question}\n\n"
        f"Choices:\n{_format_choices(choices)}\n\n"
        "Answer with the format: The correct answer is (X)."
    )


def few_shot(shots: Sequence[Shot], question: str, choices: Sequence[str]) -> str:
    """Return the 5-shot prompt, with any number of shots; it ends with the question's choices."""
    examples = (
        # Without the full stop that the zero-shot prompt asks for, as in the paper.
        f"{_format_question(shot.question, shot.choices)}\n"
        f"The correct answer is ({LETTERS[shot.answer]})"
        for shot in shots
    )
    intro = (
        "Here are some example expert multiple-choice questions. "
        "After the examples, answer the final question."
    )
    return "\n\n".join((intro, *examples, _format_question(question, choices)))


def answer_line(answer: int) -> str:
    """Return the line that a model is asked to write."""
    if not 0 <= answer < len(LETTERS):
        raise ConfigError(f"answer must be 0 to {len(LETTERS) - 1}, got {answer}.")
    return f"The correct answer is ({LETTERS[answer]})."


def word_problem(question: str) -> str:
    """Return the prompt of a GSM8K problem, whose answer is a number."""
    return f'{question}\nThink step by step, and end with "The answer is N.", N being a number.'


def program(task: str, tests: Sequence[str]) -> str:
    """Return the prompt of an MBPP task, with the tests that the code must pass."""
    listed = "\n".join(tests)
    return (
        f"You are an expert Python programmer, and here is your task: {task} "
        f"Your code should pass these tests:\n\n{listed}\n\n"
        "Answer with the code in a ```python block."
    )


def completion(prompt: str) -> str:
    """Return the prompt of a HumanEval function, which is given up to its body."""
    code = prompt.strip("\n")
    return (
        "Complete this Python function. Answer with the whole function in a ```python block.\n\n"
        f"```python\n{code}\n```"
    )


def _format_question(question: str, choices: Sequence[str]) -> str:
    # The paper's listing has a space after some of its "Choices:", which we take for an accident.
    return f"Question: {question}\nChoices:\n{_format_choices(choices)}"


def _format_choices(choices: Sequence[str]) -> str:
    if not 1 <= len(choices) <= len(LETTERS):
        raise ConfigError(
            f"A question needs 1 to {len(LETTERS)} choices, a letter each, got {len(choices)}."
        )
    return "\n".join(
        f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)
    )
