"""The forms in which data sets hold examples: which fields a row has, and what is read from them.

Knows mappings; nothing of files or tokenizers.

The first form that a row fits is used. A question, an instruction and a prompt with its response
are read with the words between them that models know from their training; a prompt with its
completion is read as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, TypeAlias

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.quiz import Row, describe_answer, find_choices, read_answer, read_cell

Parts: TypeAlias = dict[str, Any]  # fields of an Example

_ROLES: Final = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "system": "system",
}  # fmt: skip


class Form(NamedTuple):
    """A form: the fields it needs, those it may have, and how it is read; None: it does not fit."""

    needs: tuple[str, ...]
    read: Callable[[Row], Parts | None]
    may: tuple[str, ...] = ()


def is_chat(item: object) -> bool:
    """Tell whether `item` is a list of messages, each with its role and content."""
    return _is_list_with(item, {"role", "content"})


def _is_list_with(item: object, fields: set[str]) -> bool:
    return (
        isinstance(item, Sequence)
        and len(item) > 0
        and all(isinstance(part, Mapping) and fields <= set(part) for part in item)
    )


def cloze(question: str) -> str:
    """Return the context that each answer follows, as " " + answer."""
    return f"Question: {question}\nAnswer:"


def ask_instruction(instruction: str, given: str = "") -> str:
    """Return an instruction, with its input if it has one, as models trained on Alpaca know it."""
    middle = f"### Input:\n{given}\n\n" if given else ""
    return f"### Instruction:\n{instruction}\n\n{middle}### Response:\n"


def read_turns(turns: object) -> tuple[Mapping[str, Any], ...] | None:
    """Return chat messages as they are, and ShareGPT's turns as chat messages.

    Raises:
        ReferenceSetError: A turn is from somebody unknown.
    """
    turns = read_cell(turns)
    if is_chat(turns):
        return tuple(turns)  # type: ignore[arg-type]  # just checked
    if not _is_list_with(turns, {"from", "value"}):
        return None
    messages = []
    for turn in turns:  # type: ignore[attr-defined]  # just checked
        role = _ROLES.get(str(turn["from"]))
        if role is None:
            raise ReferenceSetError(
                f"has a turn from {turn['from']!r}; known are {', '.join(map(repr, _ROLES))}"
            )
        messages.append({"role": role, "content": turn["value"]})
    return tuple(messages)


def _read_messages(row: Row) -> Parts | None:
    turns = read_turns(row["messages"])
    return None if turns is None else {"messages": turns}


def _read_conversations(row: Row) -> Parts | None:
    return _read_messages({"messages": row["conversations"]})


def _read_choices(row: Row) -> Parts | None:
    choices = row["choices"]
    if not _are_texts(row, "question") or not _is_texts(choices):
        return None
    readings = set(read_answer(row).values())
    if len(readings) != 1:
        raise ReferenceSetError(describe_answer(row))
    right = choices[readings.pop()]
    wrong = tuple(dict.fromkeys(f" {choice}" for choice in choices if choice != right))
    return {"prompt": cloze(row["question"]), "completion": f" {right}", "distractors": wrong}


def _read_completion(row: Row) -> Parts | None:
    prompt, completion = row["prompt"], row["completion"]
    if is_chat(prompt) and is_chat(completion):
        return {"messages": (*prompt, *completion)}
    if not _are_texts(row, "prompt", "completion"):
        return None
    distractors = _read_distractors(row)
    return {"prompt": prompt, "completion": completion, "distractors": distractors}


def _read_distractors(row: Row) -> tuple[str, ...]:
    given = read_cell(row.get("distractors", ()))
    if not isinstance(given, list | tuple) or not all(
        isinstance(each, str) and each for each in given
    ):
        raise ReferenceSetError(f'needs "distractors" as a list of texts; has {given!r}')
    if row["completion"] in given:
        raise ReferenceSetError(f"has its completion among its distractors: {given!r}")
    return tuple(given)


def _read_response(row: Row) -> Parts | None:
    if not _are_texts(row, "prompt", "response"):
        return None
    prompt, response = row["prompt"], row["response"]
    apart = prompt[-1:].isspace() or response[:1].isspace() or not prompt
    return {"prompt": prompt if apart else f"{prompt}\n", "completion": response}


def _read_alpaca(row: Row) -> Parts | None:
    given = row.get("input", "")
    if not _are_texts(row, "instruction", "output") or not isinstance(given, str):
        return None
    return {"prompt": ask_instruction(row["instruction"], given), "completion": row["output"]}


def _read_question(row: Row) -> Parts | None:
    if not _are_texts(row, "question", "answer") or "choices" in row or "options" in row:
        return None  # an answer that chooses is none without the choices
    return {"prompt": cloze(row["question"]), "completion": f" {row['answer']}"}


def _read_text(row: Row) -> Parts | None:
    return {"completion": row["text"]} if _are_texts(row, "text") else None


FORMS: Final = (
    Form(("messages",), _read_messages),
    Form(("conversations",), _read_conversations),
    Form(("question", "choices", "answer"), _read_choices),
    Form(("prompt", "completion"), _read_completion, may=("distractors",)),
    Form(("prompt", "response"), _read_response),
    Form(("instruction", "output"), _read_alpaca, may=("input",)),
    Form(("question", "answer"), _read_question),
    Form(("text",), _read_text),
)
FIELDS: Final = tuple(dict.fromkeys(name for each in FORMS for name in (*each.needs, *each.may)))
KNOWN: Final = "; ".join(
    f"{', '.join(each.needs[:-1])} and {each.needs[-1]}" if each.needs[1:] else each.needs[0]
    for each in FORMS
)


def read_form(row: Row, columns: Mapping[str, str] | None = None) -> Parts:
    """Return the fields of the Example that a row holds.

    Args:
        columns: The column of the row that each of these fields has. A form that does not have all
            of these fields is not considered.

    Raises:
        ReferenceSetError: The row fits no form; the message is the end of a sentence.
    """
    columns = columns or {}
    given: Row = rename(row, columns)
    given = find_choices({name: value for name, value in given.items() if value is not None})
    fitting = [
        form
        for form in FORMS
        if set(columns) <= {*form.needs, *form.may} and all(name in given for name in form.needs)
    ]
    # The cells of other forms are empty where a table has rows of several.
    fitting.sort(key=lambda form: all(given[name] == "" for name in form.needs))
    for form in fitting:
        parts = form.read(given)
        if parts is not None:
            return parts
    raise ReferenceSetError(
        f"needs the columns of one of these forms: {KNOWN}; has {describe(row)}. Say which column "
        f'is which with --column text=NAME, in Python columns={{"text": "NAME"}}'
    )


def rename(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the row with each field of `columns` taken from its column.

    Raises:
        ReferenceSetError: The row does not have the column; the message is the end of a sentence.
    """
    missing = next((column for column in columns.values() if column not in row), None)
    if missing is not None:
        raise ReferenceSetError(f"has no column {missing!r}; has {describe(row)}")
    return {**row, **{field: row[column] for field, column in columns.items()}}


def describe(row: Row) -> str:
    """Return the columns of a row and the types of their values."""
    found = ", ".join(f"{name!r} ({type(value).__name__})" for name, value in row.items())
    return found or "nothing"


def check_columns(columns: Mapping[str, str], fields: Sequence[str] = FIELDS) -> None:
    """Refuse names that are no fields.

    Raises:
        ReferenceSetError: There is one, or `columns` is no mapping.
    """
    if not isinstance(columns, Mapping):
        raise ReferenceSetError(
            f'columns must be a mapping, such as {{"text": "body"}}; got {columns!r}.'
        )
    for name in columns:
        if name not in fields:
            close = get_close_matches(name, fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ReferenceSetError(
                f"There is no field {name!r}.{hint} Known: {', '.join(fields)}. A column is named "
                f"as FIELD=COLUMN, for example {fields[-1]}=body."
            )


def _are_texts(row: Row, *names: str) -> bool:
    return all(isinstance(row[name], str) for name in names)


def _is_texts(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 1
        and all(isinstance(each, str) for each in value)
    )
