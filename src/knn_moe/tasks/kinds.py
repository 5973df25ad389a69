"""The kinds of rows: how each is put to a model, and how an answer is judged.

Prompts are the paper's (prompts.py). parsing.py reads the outputs and sandbox.py runs programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from knn_moe.reference.forms import cloze
from knn_moe.reference.quiz import LETTERS, describe_answer
from knn_moe.tasks import prompts
from knn_moe.tasks.parsing import (
    complete_function,
    parse_letter,
    parse_number,
    parse_program,
    same_number,
)
from knn_moe.tasks.sandbox import run_program
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, TEXT, Kind, Options, Row, Verdict

_NO_ANSWER: Final = Verdict(None, 0.0)


class _WithoutChoices:
    """A kind whose rows have no choices; `field` holds the question."""

    field: ClassVar[str]

    def question(self, row: Row) -> str:
        return str(row[self.field])

    def options(self, row: Row) -> Options:
        raise NotImplementedError(f"A row of the kind {type(self).__name__} has no choices.")


@dataclass(frozen=True)
class Choice:
    """A multiple-choice question: {"question", "choices": [...], "answer": index from 0}.

    `bare`: the choices continue the question itself, as in HellaSwag.
    """

    bare: bool = False
    max_new_tokens: int = 256
    scorings: tuple[str, ...] = (GENERATION, LIKELIHOOD)

    def check(self, row: Row) -> str | None:
        choices = row.get("choices")
        if not isinstance(row.get("question"), str) or not _is_texts(choices):
            return 'needs a "question" and a list of "choices"'
        count = len(choices)  # type: ignore[arg-type]  # just checked
        if not 2 <= count <= len(LETTERS):
            return f"has {count} choices; a question needs 2 to {len(LETTERS)}"
        answer = row.get("answer")
        if isinstance(answer, str):
            return describe_answer(row)
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < count:
            return f'needs the "answer" as a number from 0 to {count - 1}, has {answer!r}'
        return None

    def question(self, row: Row) -> str:
        return str(row["question"])

    def prompt(self, row: Row) -> str:
        return prompts.zero_shot(row["question"], row["choices"])

    def completion(self, row: Row) -> str:
        return prompts.answer_line(row["answer"])

    def options(self, row: Row) -> Options:
        question = row["question"] if self.bare else cloze(row["question"])
        return Options(question, tuple(f" {choice}" for choice in row["choices"]), row["answer"])

    def judge(self, output: str, row: Row) -> Verdict:
        chosen = parse_letter(output, len(row["choices"]))
        if chosen is None:
            return _NO_ANSWER
        return Verdict(LETTERS[chosen], float(chosen == row["answer"]))


@dataclass(frozen=True)
class Number(_WithoutChoices):
    """A word problem and its number: {"question", "solution", "answer"}."""

    field: ClassVar[str] = "question"
    max_new_tokens: int = 400
    scorings: tuple[str, ...] = (GENERATION,)

    def check(self, row: Row) -> str | None:
        if _has_texts(row, "question", "answer") and parse_number(row["answer"]) is not None:
            return None
        return 'needs a "question", and an "answer" that is a number written as a string'

    def prompt(self, row: Row) -> str:
        return prompts.word_problem(row["question"])

    def completion(self, row: Row) -> str:
        return f"{row.get('solution', '')}\nThe answer is {row['answer']}.".strip()

    def judge(self, output: str, row: Row) -> Verdict:
        number = parse_number(output)
        if number is None:
            return _NO_ANSWER
        return Verdict(number, float(same_number(number, row["answer"])))


@dataclass(frozen=True)
class Program(_WithoutChoices):
    """A program that must pass its tests: {"prompt", "code", "tests": [...]}, optional "setup"."""

    field: ClassVar[str] = "prompt"
    runs_programs: ClassVar[bool] = True
    max_new_tokens: int = 400
    scorings: tuple[str, ...] = (GENERATION,)

    def check(self, row: Row) -> str | None:
        if _has_texts(row, "prompt", "code") and _is_texts(row.get("tests")):
            return None
        return 'needs a "prompt", its "code" and a list of "tests"'

    def prompt(self, row: Row) -> str:
        return prompts.program(row["prompt"], row["tests"])

    def completion(self, row: Row) -> str:
        return f"```python\n{row['code'].strip()}\n```"

    def judge(self, output: str, row: Row) -> Verdict:
        code = parse_program(output)
        if code is None:
            return _NO_ANSWER
        tests = "\n".join([row.get("setup") or "", *row["tests"]])
        return Verdict(code, float(run_program(code, tests).passed))


@dataclass(frozen=True)
class Function(_WithoutChoices):
    """HumanEval: {"prompt", "code", "tests": [a check(candidate) program], "entry_point"}."""

    field: ClassVar[str] = "prompt"
    runs_programs: ClassVar[bool] = True
    max_new_tokens: int = 400
    scorings: tuple[str, ...] = (GENERATION,)

    def check(self, row: Row) -> str | None:
        if _has_texts(row, "prompt", "code", "entry_point") and _is_texts(row.get("tests")):
            return None
        return 'needs a "prompt", its "code", an "entry_point" and a list of "tests"'

    def prompt(self, row: Row) -> str:
        return prompts.completion(row["prompt"])

    def completion(self, row: Row) -> str:
        return f"```python\n{row['prompt']}{row['code'].rstrip()}\n```"

    def judge(self, output: str, row: Row) -> Verdict:
        code = complete_function(row["prompt"], output, row["entry_point"])
        tests = "\n".join([*row["tests"], f"check({row['entry_point']})"])
        return Verdict(code, float(run_program(code, tests).passed))


@dataclass(frozen=True)
class Text(_WithoutChoices):
    """Running text, every token of which is predicted: {"text"}."""

    field: ClassVar[str] = "text"
    max_new_tokens: int = 0
    scorings: tuple[str, ...] = (TEXT,)

    def check(self, row: Row) -> str | None:
        return None if _has_texts(row, "text") else 'needs a "text"'

    def prompt(self, row: Row) -> str:
        return ""

    def completion(self, row: Row) -> str:
        return str(row["text"])

    def judge(self, output: str, row: Row) -> Verdict:
        raise NotImplementedError("A text is not generated.")


def count_choices(kind: Kind, row: Row) -> int | None:
    """Return the number of choices of a row, or None for a kind without choices."""
    if isinstance(kind, Choice) or LIKELIHOOD in kind.scorings:
        return len(kind.options(row).continuations)
    return None


def kind_of(row: Row) -> Choice | Number | Function | Program | Text | None:
    """Return the kind that the row's fields suggest, or None; `check` says what the row lacks."""
    if "choices" in row:
        return Choice()
    if "tests" in row:
        return Function() if "entry_point" in row else Program()
    if "text" in row:
        return Text()
    return Number() if "question" in row else None


def _is_texts(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(part, str) for part in value)
    )


def _has_texts(row: Row, *fields: str) -> bool:
    return all(isinstance(row.get(field), str) for field in fields)
