"""Prompts without completions: texts or conversations, from whatever holds them.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, tokenise_prompt
from knn_moe.reference.forms import (
    ask_instruction,
    check_columns,
    cloze,
    describe,
    read_turns,
    rename,
)
from knn_moe.reference.load import Examples, check_characters
from knn_moe.reference.source import Source

_ANSWERS: Final = ("completion", "response", "output", "answer")
_FIELDS: Final = ("messages", "conversations", "prompt", "question", "instruction", "input")


@dataclass(frozen=True)
class Prompt:
    """A text that a model continues, or a conversation that it answers."""

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None

    @classmethod
    def of(cls, item: PromptLike, columns: Mapping[str, str] | None = None) -> Prompt:
        """Make a prompt from a string, chat messages, or a mapping in a form without its answer.

        Args:
            columns: The name that a field of the form has in a mapping.

        Raises:
            ReferenceSetError: It is something else; the message is the end of a sentence.
        """
        if isinstance(item, Prompt):
            return item
        if isinstance(item, Mapping):
            row = rename(item, columns or {})
            known = {name: row[name] for name in columns} if columns else row
            return cls._from_mapping({k: v for k, v in known.items() if v is not None}, item)
        if columns:
            raise ReferenceSetError(
                f"must have columns, because some were named; it is a {type(item).__name__}"
            )
        if isinstance(item, str):
            if not item:
                raise ReferenceSetError("is empty")
            return cls(text=item)
        messages = read_turns(item)
        if messages is None:
            raise ReferenceSetError(f"must be a text or chat messages; got {type(item).__name__}")
        if messages[-1]["role"] == "assistant":
            raise ReferenceSetError("ends with an answer already and needs no label")
        return cls(messages=messages)

    @classmethod
    def _from_mapping(cls, row: Mapping[str, Any], item: Mapping[str, Any]) -> Prompt:
        answered = next((name for name in _ANSWERS if row.get(name, "") != ""), None)
        if answered is not None:
            raise ReferenceSetError(f"has its {answered!r} already and needs no label")
        for name in ("messages", "conversations"):
            turns = read_turns(row[name]) if name in row else None
            if turns is not None:
                return cls.of(turns)
        if "prompt" in row:
            return cls.of(row["prompt"])
        if isinstance(row.get("question"), str):
            return cls(text=cloze(row["question"]))
        given = row.get("input", "")
        if isinstance(row.get("instruction"), str) and isinstance(given, str):
            return cls(text=ask_instruction(row["instruction"], given))
        if "text" in row:
            raise ReferenceSetError(
                'has "text", which needs no label: build a memory of it, or name it as the column '
                "of prompts with --column prompt=text"
            )
        raise ReferenceSetError(
            f"needs one of messages, conversations, prompt, question and instruction; has "
            f"{describe(item)}. Say which column is which with --column prompt=NAME, in Python "
            f'columns={{"prompt": "NAME"}}'
        )

    def as_chat(self) -> Prompt:
        """Return a text as a message of a user, and a conversation unchanged."""
        if self.messages is not None:
            return self
        return Prompt(messages=({"role": "user", "content": self.text},))

    def tokens(self, tokenizer: Any) -> list[int]:
        """Return the token ids, of a conversation through the chat template."""
        return tokenise_prompt(self.text if self.messages is None else self.messages, tokenizer)

    def with_answer(self, answer: str) -> Example:
        """Return the prompt and `answer` as an example."""
        if self.messages is None:
            return Example(self.text, answer)
        reply = {"role": "assistant", "content": answer.strip()}
        return Example(messages=(*self.messages, reply))

    def as_text(self) -> str:
        """Return the prompt as a judge reads it."""
        if self.messages is None:
            return self.text
        if len(self.messages) == 1:
            return str(self.messages[0]["content"])
        return "\n\n".join(f"{each['role']}: {each['content']}" for each in self.messages)


PromptLike: TypeAlias = Prompt | str | Mapping[str, Any] | Sequence[Any]


def load_prompts(source: Examples, columns: Mapping[str, str] | None = None) -> list[Prompt]:
    """Load prompts from all that `load_examples` takes; a text file has one on each line.

    Args:
        source: A name, or what holds the prompts.
        columns: The column that each field is in, for example {"prompt": "body"}.

    Raises:
        ReferenceSetError: They cannot be read, or an item is not a prompt.
    """
    return read_prompts(Source(source, noun="Prompt", default_split="\n"), columns)


def read_prompts(source: Source, columns: Mapping[str, str] | None = None) -> list[Prompt]:
    """Read all items of `source` as prompts.

    Raises:
        ReferenceSetError: They cannot be read, or an item is not a prompt.
    """
    check_columns(columns or {}, _FIELDS)
    prompts = []
    for place, value in source.items():
        try:
            prompt = Prompt.of(value, columns)
            check_characters([prompt.text, *(each["content"] for each in prompt.messages or ())])
        except ReferenceSetError as error:
            raise ReferenceSetError(f"{place}: {error}.") from None
        prompts.append(prompt)
    return prompts
