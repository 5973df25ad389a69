"""Prompts without completions: texts or conversations, from a file or given.

Knows what an answer makes of a prompt; nothing of models.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, is_chat, tokenise_prompt


@dataclass(frozen=True)
class Prompt:
    """What a model is asked: a text that it goes on with, or a conversation that it answers."""

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None

    @classmethod
    def of(cls, item: PromptLike) -> Prompt:
        """From a string, chat messages, or a mapping with "prompt" or "messages" of either."""
        if isinstance(item, Prompt):
            return item
        if isinstance(item, Mapping):
            return cls._of_mapping(item)
        if isinstance(item, str):
            if not item:
                raise ReferenceSetError("is empty")
            return cls(text=item)
        if is_chat(item):
            messages: tuple[Any, ...] = tuple(item)
            if messages[-1]["role"] == "assistant":
                raise ReferenceSetError("ends with an answer already: it needs no label")
            return cls(messages=messages)
        raise ReferenceSetError(f"must be a text or chat messages; got {type(item).__name__}")

    @classmethod
    def _of_mapping(cls, item: Mapping[str, Any]) -> Prompt:
        if "completion" in item:
            raise ReferenceSetError("has a completion already: it needs no label")
        for name in ("messages", "prompt"):
            if name in item:
                return cls.of(item[name])
        if "text" in item:
            raise ReferenceSetError(
                'has "text", which is its own label: build a memory of it as it is, or call it '
                '"prompt"'
            )
        found = ", ".join(map(repr, item))
        raise ReferenceSetError(f'needs "prompt" or "messages"; has {found or "nothing"}')

    def in_chat(self) -> Prompt:
        """As a user's message, if it is a text."""
        if self.messages is not None:
            return self
        return Prompt(messages=({"role": "user", "content": self.text},))

    def tokens(self, tokenizer: Any) -> list[int]:
        return tokenise_prompt(self.text if self.messages is None else self.messages, tokenizer)

    def answered(self, answer: str) -> Example:
        if self.messages is None:
            return Example(self.text, answer)
        said = {"role": "assistant", "content": answer.strip()}
        return Example(messages=(*self.messages, said))

    def shown(self) -> str:
        """For a judge. Of a conversation of one message, that message."""
        if self.messages is None:
            return self.text
        if len(self.messages) == 1:
            return str(self.messages[0]["content"])
        return "\n\n".join(f"{each['role']}: {each['content']}" for each in self.messages)


PromptLike: TypeAlias = Prompt | str | Mapping[str, Any] | Sequence[Any]


def load_prompts(source: str | Path | Iterable[PromptLike]) -> list[Prompt]:
    """From a .jsonl or .jsonl.gz file, a .txt file of one prompt a line, or any iterable."""
    if isinstance(source, str | Path):
        found = list(_from_file(Path(source)))
        if not found:
            raise ReferenceSetError(f"{str(source)!r} holds no prompts: it is empty.")
        return found
    prompts = []
    for number, item in enumerate(source):
        try:
            prompts.append(Prompt.of(item))
        except ReferenceSetError as error:
            raise ReferenceSetError(f"Prompt {number} {error}.") from None
    return prompts


def _from_file(path: Path) -> Iterator[Prompt]:
    if not path.is_file():
        raise ReferenceSetError(f"No file of prompts at {str(path)!r}.")
    if ".jsonl" not in path.suffixes and path.suffix != ".txt":
        raise ReferenceSetError(
            f"Cannot tell what {str(path)!r} holds. Use .jsonl or .jsonl.gz (one JSON object a "
            f'line with "prompt" or "messages"), or .txt (one prompt a line).'
        )
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(path, number, line)
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ReferenceSetError(f"Cannot read {str(path)!r}: {error}.") from None


def _parse(path: Path, number: int, line: str) -> Prompt:
    try:
        return Prompt.of(line.rstrip("\r\n") if path.suffix == ".txt" else json.loads(line))
    except json.JSONDecodeError as error:
        raise ReferenceSetError(f"{path}, line {number}: not JSON ({error.msg}).") from None
    except ReferenceSetError as error:
        raise ReferenceSetError(f"{path}, line {number}: {error}.") from None
