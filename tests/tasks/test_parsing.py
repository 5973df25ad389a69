"""Every hand-made output is parsed as a reader would, and no text breaks the parser."""

from __future__ import annotations

import ast
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.outputs import COMPLETIONS, LETTERS, NUMBERS, PROGRAMS, PROMPTS
from knn_moe.tasks import prompts
from knn_moe.tasks.parsing import (
    complete_function,
    parse_letter,
    parse_number,
    parse_program,
    same_number,
)

steady = settings(derandomize=True, deadline=None, max_examples=60)

# Any text, and texts of the pieces that the parsers look for.
PIECES = (
    *("answer", "The correct answer is ", "(B)", "A", "c", " or ", ", ", "Question:", "\n"),
    *("####", "=", "-", "1,234", ".5", "/", "0", "½", "'", "（", "）", "\\boxed{", "}"),
    *("```", "```python\n", "def f():", "    return 1"),
    *("<think>", "</think>", "<|channel|>", "final", "<|message|>"),
)
texts = st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def name(output: object) -> str | None:
    return repr(output)[1:-1][:60] if isinstance(output, str) else None


def passes(code: str, check: str) -> bool:
    try:
        exec(compile(f"{code}\n{check}\n", "<completion>", "exec"), {})
    except Exception:
        return False
    return True


@pytest.mark.parametrize(("output", "count", "expected"), LETTERS, ids=name)
def test_letters(output: str, count: int, expected: int | None) -> None:
    assert parse_letter(output, count) == expected


@pytest.mark.parametrize(("output", "expected"), NUMBERS, ids=name)
def test_numbers(output: str, expected: str | None) -> None:
    assert parse_number(output) == expected


@pytest.mark.parametrize(("output", "expected"), PROGRAMS, ids=name)
def test_programs(output: str, expected: str | None) -> None:
    assert parse_program(output) == expected


@pytest.mark.parametrize(("output", "prompt", "expected"), COMPLETIONS, ids=name)
def test_completions(output: str, prompt: str, expected: bool) -> None:
    begun, entry_point, check = PROMPTS[prompt]
    assert passes(complete_function(begun, output, entry_point), check) == expected


def test_the_tables_are_long_and_have_no_duplicates() -> None:
    for cases in (LETTERS, NUMBERS, PROGRAMS + COMPLETIONS):
        assert len(cases) >= 60
        assert len({case[:-1] for case in cases}) == len(cases)


@pytest.mark.slow
@given(output=texts, count=st.integers(0, 30))
@steady
def test_any_text_can_be_parsed(output: str, count: int) -> None:
    letter = parse_letter(output, count)
    assert letter is None or 0 <= letter < count
    number = parse_number(output)
    assert number is None or parse_number(number) == number
    assert number is None or Fraction(number) * 0 == 0
    program = parse_program(output)
    assert program is None or program.strip()
    begun, entry_point, _ = PROMPTS["total"]
    assert complete_function(begun, output, entry_point)


@given(count=st.integers(1, 26), data=st.data())
@steady
def test_the_line_that_the_prompt_asks_for_is_parsed(count: int, data: st.DataObject) -> None:
    answer = data.draw(st.integers(0, count - 1))
    line = prompts.answer_line(answer)
    assert parse_letter(line, count) == answer
    assert parse_letter(line.upper(), count) == answer
    assert parse_letter(f"<think>{prompts.answer_line(25)}</think>\n{line}", count) == answer
    assert parse_letter(line, answer) is None
    listed = prompts.few_shot([], "Which?", [f"choice {at}" for at in range(count)])
    assert parse_letter(f"{line}\n\n{listed}\n{prompts.answer_line(0)}", count) == answer


@given(value=st.integers(-(10**12), 10**12), places=st.integers(0, 3))
@steady
def test_a_number_is_parsed_however_it_is_written(value: int, places: int) -> None:
    for written in (f"{value}", f"{value:,}", f"{value:,}.{'0' * places}", f"{2 * value}/2"):
        assert parse_number(f"7 + 1 = 8. The answer is {written}.") == str(value)
        assert same_number(written, str(value))
        assert not same_number(written, str(value + 1))


def test_values_are_compared_exactly() -> None:
    assert same_number("1/2", "0.50")
    assert same_number("$1,234.00", "1234")
    assert not same_number("3.33", "10/3")
    assert not same_number("none", "none")


def test_thousands_of_digits_are_not_a_number() -> None:
    assert parse_number("9" * 5000) is None
    assert parse_number(f"0.{'3' * 5000}") == f"0.{'3' * 100}"


@given(body=st.sampled_from(["return 1", "x = 2\nreturn x", "if True:\n    return 3"]))
@steady
def test_a_fenced_program_comes_back_as_it_was(body: str) -> None:
    code = "def f():\n" + "\n".join(f"    {line}" for line in body.split("\n"))
    assert parse_program(f"Here:\n```python\n{code}\n```\nDone.") == code
    assert parse_program(code) == code
    begun = 'def f():\n    """Some number."""\n'
    for output in (code, body, f"```python\n{body}\n```"):
        defined = ast.parse(complete_function(begun, output, "f")).body
        assert [type(line) for line in defined] == [ast.FunctionDef]


def test_deep_nesting_is_not_a_program() -> None:
    assert parse_program("x = " + "(" * 5000) is None
    assert parse_program("x = " + "-" * 100_000 + "1") is None
    assert parse_program("x = 1\0") is None


@pytest.mark.parametrize("piece", ["answer is the ", "answer to ", "\\boxed{", "\n", "1,", "(A), "])
def test_an_endless_repetition_is_parsed_quickly(piece: str) -> None:
    # Patterns that backtrack would take minutes here.
    output = piece * 5000
    parse_letter(output, 4)
    parse_number(output)
    assert parse_program(output) is None
