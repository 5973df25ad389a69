"""Questions with choices, in the ways in which data sets write them: where the choices are, and
which of them the answer names.

Knows mappings; nothing of prompts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

Row: TypeAlias = Mapping[str, Any]

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LETTER: Final = re.compile(r"[(\[]?([A-Za-z])[)\].:]*")
_CHOICES: Final = ("choices", "options")
_ANSWERS: Final = ("answer", "answerKey", "answer_key", "answer_idx", "label")
_LABELS: Final = "choice_labels"


def find_choices(row: Row) -> Row:
    """Return the row with its choices as a list of texts in "choices", and its "answer".

    Choices may be a list, such a list as JSON in the cell of a table, a mapping from labels to
    texts, a mapping of "text" and "label" as in ARC, or the columns A, B, and so on. A row without
    a question or without choices is returned as it is.
    """
    name = next((name for name in _CHOICES if row.get(name) is not None), None)
    found = _split_choices(row[name]) if name else _find_columns(row)
    answer = next((name for name in _ANSWERS if row.get(name) is not None), None)
    if "question" not in row or found is None:
        return row
    labels, texts = found
    known = {"choices": texts} | ({"answer": row[answer]} if answer else {})
    return {**row, **known, **({_LABELS: labels} if labels else {})}


def _split_choices(given: object) -> tuple[list[str], list[str]] | None:
    """Return the labels, if there are some, and the texts of choices."""
    given = read_cell(given)
    labels: Sequence[Any] = ()
    if isinstance(given, Mapping) and {"text", "label"} <= set(given):
        labels, given = given["label"], given["text"]
    elif isinstance(given, Mapping):
        filled = sorted((str(label), text) for label, text in given.items() if text is not None)
        labels, given = [label for label, _ in filled], [text for _, text in filled]
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        return None
    if labels and len(labels) != len(given):
        return None
    return [str(label) for label in labels], list(given)


def read_cell(given: object) -> object:
    """Return the list or the mapping that a table's cell holds as JSON, or as Python writes it.

    Everything else is returned as it is.
    """
    if isinstance(given, str) and given.lstrip().startswith(("[", "{")):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                found: object = read(given)
                return found
    return given


def _find_columns(row: Row) -> tuple[list[str], list[str]] | None:
    """Return the columns A, B, and so on; cells at the end may be empty."""
    labels = [letter for letter in LETTERS if row.get(letter) not in (None, "")]
    if len(labels) < 2 or labels != list(LETTERS[: len(labels)]):
        return None
    return labels, [str(row[letter]) for letter in labels]


def read_answer(row: Row) -> dict[str, int]:
    """Return each way in which the answer names one of the choices, and the index of that choice.

    A number is an index from 0. A text is a label, if the choices have labels, or the text of a
    choice; without labels it may be a letter ("B", "(b)"), or an index written in digits, too.
    """
    choices, answer, labels = row["choices"], row.get("answer"), row.get(_LABELS, ())
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        return {}
    if isinstance(answer, int):
        if str(answer) in labels:
            return {"label": labels.index(str(answer))}
        return {"index": answer} if 0 <= answer < len(choices) else {}
    ways = {}
    given = answer.strip()
    letter = _LETTER.fullmatch(given)
    texts = [choice.strip() for choice in choices]
    if given in texts:
        ways["text"] = texts.index(given)
    if labels:
        named = given if given in labels else letter[1].upper() if letter else ""
        return {**ways, "label": labels.index(named)} if named in labels else ways
    if letter and LETTERS.index(letter[1].upper()) < len(choices):
        ways["letter"] = LETTERS.index(letter[1].upper())
    if given.isdecimal() and int(given) < len(choices):
        ways["index"] = int(given)
    return ways


def choose_answers(rows: Sequence[Row]) -> list[Row]:
    """Return rows with the index of the right choice as their answer, where that is certain.

    A row whose answer could mean several choices is read in a way in which all rows can be read:
    "1" is an index if the answer of another row is "0" and no choice of it is called so.
    """
    read = [read_answer(row) if "choices" in row else None for row in rows]
    written = [
        set(ways)
        for row, ways in zip(rows, read, strict=True)
        if ways is not None and isinstance(row.get("answer"), str)
    ]
    common = set.intersection(*written) if written else set()
    return [
        row if ways is None else _settle(row, ways, common)
        for row, ways in zip(rows, read, strict=True)
    ]


def _settle(row: Row, ways: Mapping[str, int], common: set[str]) -> Row:
    readings = set(ways.values())
    if len(readings) > 1:
        readings = {place for way, place in ways.items() if way in common}
    if len(readings) != 1:
        return row
    rest = {name: value for name, value in row.items() if name != _LABELS}
    return {**rest, "answer": readings.pop()}


def describe_answer(row: Row) -> str:
    """Return what is wrong with the answer of a question, as the end of a sentence."""
    how = "could mean several of" if read_answer(row) else "is none of"
    return (
        f"has the answer {row.get('answer')!r}, which {how} the choices {list(row['choices'])!r}. "
        f"Give its index, from 0"
    )
