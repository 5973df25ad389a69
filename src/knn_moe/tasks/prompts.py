"""The prompts, word for word (appendix A), and those of the tasks the paper has no words for.

Text in, text out: knows nothing of models, chat templates or where questions come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from knn_moe.errors import ConfigError

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Shot:
    """An example with its answer, an index into its choices."""

    question: str
    choices: Sequence[str]
    answer: int

    def __post_init__(self) -> None:
        if not 0 <= self.answer < len(self.choices):
            raise ConfigError(f"There is no choice {self.answer} among {len(self.choices)}.")


def zero_shot(question: str, choices: Sequence[str]) -> str:
    """The zero-shot prompt of a multiple-choice question."""
    return (
        f"What is the correct answer to this question: {question}\n\n"
        f"Choices:\n{_listed(choices)}\n\n"
        "Answer with the format: The correct answer is (X)."
    )


def few_shot(shots: Sequence[Shot], question: str, choices: Sequence[str]) -> str:
    """The 5-shot prompt, with any number of shots; it ends after the last question's choices."""
    examples = (
        # Without the full stop the zero-shot prompt asks for: so it stands in the paper.
        f"{_posed(shot.question, shot.choices)}\nThe correct answer is ({LETTERS[shot.answer]})"
        for shot in shots
    )
    intro = (
        "Here are some example expert multiple-choice questions. "
        "After the examples, answer the final question."
    )
    return "\n\n".join((intro, *examples, _posed(question, choices)))


def answer_line(answer: int) -> str:
    """What a model is asked to say."""
    if not 0 <= answer < len(LETTERS):
        raise ConfigError(f"Choice {answer} has no letter: there are {len(LETTERS)}.")
    return f"The correct answer is ({LETTERS[answer]})."


def cloze(question: str) -> str:
    """What each choice follows, as " " + choice, to be scored by its likelihood."""
    return f"Question: {question}\nAnswer:"


def word_problem(question: str) -> str:
    """A problem of GSM8K, whose answer is a number."""
    return f'{question}\nThink step by step, and end with "The answer is N.", N being a number.'


def program(task: str, tests: Sequence[str]) -> str:
    """A task of MBPP, with the tests the code will have to pass."""
    listed = "\n".join(tests)
    return (
        f"You are an expert Python programmer, and here is your task: {task} "
        f"Your code should pass these tests:\n\n{listed}\n\n"
        "Answer with the code in a ```python block."
    )


def completion(prompt: str) -> str:
    """A function of HumanEval, given up to its body."""
    code = prompt.strip("\n")
    return (
        "Complete this Python function. Answer with the whole function in a ```python block.\n\n"
        f"```python\n{code}\n```"
    )


def _posed(question: str, choices: Sequence[str]) -> str:
    # The paper's listing has a space after some of its "Choices:", taken for an accident.
    return f"Question: {question}\nChoices:\n{_listed(choices)}"


def _listed(choices: Sequence[str]) -> str:
    if not 1 <= len(choices) <= len(LETTERS):
        raise ConfigError(
            f"A question needs 1 to {len(LETTERS)} choices, a letter each, got {len(choices)}."
        )
    return "\n".join(
        f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)
    )
