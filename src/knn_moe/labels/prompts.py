"""Prompts without completions: texts or conversations, from a file or an iterable.

Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, tokenise_prompt
from knn_moe.reference.forms import is_chat
from knn_moe.support.files import read_lines


@dataclass(frozen=True)
class Prompt:
    """A text that a model continues, or a conversation that it answers."""

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None

    @classmethod
    def of(cls, item: PromptLike) -> Prompt:
        """Make a prompt from a string, chat messages, or a mapping with "prompt" or "messages".

        Raises:
            ReferenceSetError: It is something else; the message is the end of a sentence.
        """
        if isinstance(item, Prompt):
            return item
        if isinstance(item, Mapping):
            return cls._from_mapping(item)
        if isinstance(item, str):
            if not item:
                raise ReferenceSetError("is empty")
            return cls(text=item)
        if is_chat(item):
            messages: tuple[Any, ...] = tuple(item)
            if messages[-1]["role"] == "assistant":
                raise ReferenceSetError("ends with an answer already and needs no label")
            return cls(messages=messages)
        raise ReferenceSetError(f"must be a text or chat messages; got {type(item).__name__}")

    @classmethod
    def _from_mapping(cls, item: Mapping[str, Any]) -> Prompt:
        if "completion" in item:
            raise ReferenceSetError("has a completion already and needs no label")
        for name in ("messages", "prompt"):
            if name in item:
                return cls.of(item[name])
        if "text" in item:
            raise ReferenceSetError(
                'has "text", which needs no label: build a memory of it, or rename it to "prompt"'
            )
        fields = ", ".join(map(repr, item))
        raise ReferenceSetError(f'needs "prompt" or "messages"; has {fields or "nothing"}')

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


def load_prompts(source: str | Path | Iterable[PromptLike]) -> list[Prompt]:
    """Load prompts from a .jsonl or .jsonl.gz file, a .txt file with one per line, or an iterable.

    Raises:
        ReferenceSetError: The file cannot be read or is empty, or an item is not a prompt.
    """
    if isinstance(source, str | Path):
        prompts = list(_read_file(Path(source)))
        if not prompts:
            raise ReferenceSetError(f"{str(source)!r} is empty.")
        return prompts
    prompts = []
    for number, item in enumerate(source):
        try:
            prompts.append(Prompt.of(item))
        except ReferenceSetError as error:
            raise ReferenceSetError(f"Prompt {number} {error}.") from None
    return prompts


def _read_file(path: Path) -> Iterator[Prompt]:
    if not path.is_file():
        raise ReferenceSetError(f"There is no file {str(path)!r}.")
    if ".jsonl" not in path.suffixes and path.suffix != ".txt":
        raise ReferenceSetError(
            f"Unknown file type {path.suffix!r} of {str(path)!r}. Use .jsonl or .jsonl.gz (one "
            f'JSON object per line with "prompt" or "messages"), or .txt (one prompt per line).'
        )
    for number, line in read_lines(path, ReferenceSetError):
        yield _parse_line(path, number, line)


def _parse_line(path: Path, number: int, line: str) -> Prompt:
    try:
        return Prompt.of(line.rstrip("\r\n") if path.suffix == ".txt" else json.loads(line))
    except json.JSONDecodeError as error:
        raise ReferenceSetError(f"{path}, line {number}: not JSON ({error.msg}).") from None
    except ReferenceSetError as error:
        raise ReferenceSetError(f"{path}, line {number}: {error}.") from None
