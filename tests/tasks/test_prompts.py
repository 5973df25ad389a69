"""The prompts equal those of the paper, and the paper's own listings where it is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from knn_moe.errors import ConfigError
from knn_moe.reference.forms import cloze
from knn_moe.reference.quiz import LETTERS
from knn_moe.tasks.prompts import (
    Shot,
    answer_line,
    completion,
    few_shot,
    program,
    word_problem,
    zero_shot,
)

PAPER = Path(__file__).resolve().parents[3] / "shared" / "paper.tex"
GASES = ["helium", "neon", "argon", "krypton"]


@pytest.fixture
def listings() -> list[str]:
    """Return the paper's templates: zero-shot and 5-shot."""
    if not PAPER.exists():
        pytest.skip(f"no paper at {PAPER}")
    _, _, appendix = PAPER.read_text(encoding="utf8").partition(r"\label{app:prompts}")
    return re.findall(r"\\begin\{lstlisting\}\[.*?^\]\n(.*?)\n\\end", appendix, re.S | re.M)[:2]


def placeholders(name: str) -> list[str]:
    return [f"{{{name}[{at}]}}" for at in range(4)]


def test_zero_shot() -> None:
    assert zero_shot("Which gas?", GASES) == (
        "What is the correct answer to this question: Which gas?\n\n"
        "Choices:\n(A) helium\n(B) neon\n(C) argon\n(D) krypton\n\n"
        "Answer with the format: The correct answer is (X)."
    )


def test_few_shot() -> None:
    shots = [Shot("One?", ["a", "b", "c", "d"], 1), Shot("Two?", ["e", "f"], 0)]
    assert few_shot(shots, "Which gas?", GASES) == (
        "Here are some example expert multiple-choice questions. "
        "After the examples, answer the final question.\n\n"
        "Question: One?\nChoices:\n(A) a\n(B) b\n(C) c\n(D) d\nThe correct answer is (B)\n\n"
        "Question: Two?\nChoices:\n(A) e\n(B) f\nThe correct answer is (A)\n\n"
        "Question: Which gas?\nChoices:\n(A) helium\n(B) neon\n(C) argon\n(D) krypton"
    )


def test_zero_shot_is_the_papers_listing(listings: list[str]) -> None:
    assert zero_shot("{question}", placeholders("choices")) == listings[0]


def test_few_shot_is_the_papers_listing(listings: list[str]) -> None:
    # The ellipsis for the middle examples goes, and a letter becomes the listing's placeholder.
    listing = listings[1].replace("Choices: \n", "Choices:\n")
    listing = listing.replace("... [3 more examples] ...\n\n", "")
    shots = [Shot(f"{{{s}.question}}", placeholders(f"{s}.choices"), 0) for s in ("s1", "s5")]
    ours = few_shot(shots, "{target.question}", placeholders("target.choices"))
    for shot in ("s1", "s5"):
        ours = ours.replace("is (A)", f"is ({{{shot}.answer}})", 1)
    assert ours == listing


def test_there_are_letters_for_26_choices() -> None:
    asked = zero_shot("Which?", [f"choice {at}" for at in range(26)])
    assert "\n(E) choice 4\n" in asked
    assert "\n(J) choice 9\n" in asked
    assert "\n(Z) choice 25\n\nAnswer" in asked
    assert few_shot([], "Which?", ["x"] * 5).endswith("\n(E) x")


@pytest.mark.parametrize("count", [0, 27])
def test_choices_without_a_letter_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"got {count}"):
        zero_shot("Which?", ["x"] * count)
    with pytest.raises(ConfigError, match=f"got {count}"):
        few_shot([], "Which?", ["x"] * count)


@pytest.mark.parametrize("answer", [-1, 2])
def test_a_shot_needs_an_answer_among_its_choices(answer: int) -> None:
    with pytest.raises(ConfigError, match=f"answer must be 0 to 1, got {answer}"):
        Shot("Which?", ["x", "y"], answer)


def test_answer_line() -> None:
    assert answer_line(1) == "The correct answer is (B)."
    assert [answer_line(at)[-3] for at in range(26)] == list(LETTERS)
    for answer in (-1, 26):
        with pytest.raises(ConfigError, match=f"answer must be 0 to 25, got {answer}"):
            answer_line(answer)


def test_prompts_that_are_not_in_the_paper() -> None:
    assert cloze("Which gas?") == "Question: Which gas?\nAnswer:"
    problem = word_problem("How many eggs?")
    assert problem.startswith("How many eggs?\n")
    assert '"The answer is N."' in problem
    function = completion('\n\ndef add(a, b):\n    """Add."""\n')
    assert function.endswith('\n\n```python\ndef add(a, b):\n    """Add."""\n```')
    assert "Complete this Python function" in function


def test_program() -> None:
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    assert program("Write a function to add.", tests) == (
        "You are an expert Python programmer, and here is your task: Write a function to add. "
        "Your code should pass these tests:\n\n"
        "assert add(1, 2) == 3\nassert add(0, 0) == 0\n\n"
        "Answer with the code in a ```python block."
    )
