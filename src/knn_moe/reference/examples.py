"""The reference set: examples as users have them, and the tokens they become.

Knows text, JSON lines, data-set rows, chat templates and tokenizers. Knows nothing of models.

An example is a plain text, a prompt with its completion, or chat messages. A plain text is
tokenised exactly as `tokenizer(text)` does it; a prompt and completion as the joined text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from knn_moe.errors import ReferenceSetError
from knn_moe.support.files import read_lines

_FIELDS: Final = '"text", "prompt" and "completion", or "messages"'


@dataclass(frozen=True)
class Example:
    """One case to learn from: a completion, the prompt before it if any, or chat messages.

    Distractors are wrong completions of the same prompt. They are never in a memory: calibration
    uses them to learn which completion is right.
    """

    prompt: str = ""
    completion: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None
    distractors: tuple[str, ...] = ()

    @classmethod
    def of(cls, item: ExampleLike) -> Example:
        """Make an example of a string, a mapping with the usual fields, or chat messages."""
        if isinstance(item, Example):
            return item
        if isinstance(item, str):
            return cls(completion=item)
        if isinstance(item, Mapping):
            return cls._of_mapping(item)
        if is_chat(item):
            return cls(messages=tuple(item))  # type: ignore[arg-type]  # just checked
        raise ReferenceSetError(
            f"must be a text, a mapping with {_FIELDS}, or chat messages; got {type(item).__name__}"
        )

    @classmethod
    def _of_mapping(cls, item: Mapping[str, Any]) -> Example:
        prompt, completion = item.get("prompt"), item.get("completion")
        if is_chat(item.get("messages")):
            return cls(messages=tuple(item["messages"]))
        if isinstance(prompt, str) and isinstance(completion, str):
            return cls(prompt, completion, distractors=_read_distractors(item))
        if is_chat(prompt) and is_chat(completion):
            return cls(messages=(*item["prompt"], *item["completion"]))
        if isinstance(item.get("text"), str):
            return cls(completion=item["text"])
        found = ", ".join(f"{name!r} ({type(value).__name__})" for name, value in item.items())
        raise ReferenceSetError(f"needs {_FIELDS}; has {found or 'nothing'}")


def _read_distractors(item: Mapping[str, Any]) -> tuple[str, ...]:
    given = item.get("distractors") or ()
    if isinstance(given, str) or not all(isinstance(each, str) and each for each in given):
        raise ReferenceSetError(f'needs "distractors" as a list of texts; has {given!r}')
    if item["completion"] in given:
        raise ReferenceSetError(f"has its completion among its distractors: {given!r}")
    return tuple(given)


ExampleLike: TypeAlias = Example | str | Mapping[str, Any] | Sequence[Any]


def is_chat(item: object) -> bool:
    """Tell whether `item` is a list of messages, each with its role and content."""
    return (
        isinstance(item, Sequence)
        and len(item) > 0
        and all(isinstance(part, Mapping) and {"role", "content"} <= set(part) for part in item)
    )


def load_examples(source: str | Path | Iterable[ExampleLike]) -> list[Example]:
    """Load examples from a file, a `datasets` object or any iterable.

    Args:
        source: A .jsonl or .jsonl.gz file with an example on each line, a .txt or .md file that is
            one text, or an iterable of texts, mappings or chat messages.

    Returns:
        The examples, in their order.

    Raises:
        ReferenceSetError: The file cannot be read, or an example is not in one of the forms.
    """
    return list(iter_examples(source))


def iter_examples(source: str | Path | Iterable[ExampleLike]) -> Iterator[Example]:
    """Yield the examples of `load_examples` one at a time: a large file is never held whole."""
    if isinstance(source, str | Path):
        yield from _from_file(Path(source))
        return
    if isinstance(source, Mapping):
        raise ReferenceSetError(
            f"The reference set is a mapping of {', '.join(map(repr, source))}: choose one of them."
        )
    for number, item in enumerate(source):
        try:
            yield Example.of(item)
        except ReferenceSetError as error:
            raise ReferenceSetError(f"Example {number} {error}.") from None


def _from_file(path: Path) -> Iterator[Example]:
    if not path.is_file():
        raise ReferenceSetError(f"No file of examples at {str(path)!r}.")
    if ".jsonl" not in path.suffixes:
        yield from _from_text(path)
        return
    empty = True
    for number, line in read_lines(path, ReferenceSetError):
        empty = False
        yield _parse(path, number, line)
    if empty:
        raise ReferenceSetError(f"{str(path)!r} holds no examples: it is empty.")


def _from_text(path: Path) -> Iterator[Example]:
    if path.suffix not in (".txt", ".md"):
        raise ReferenceSetError(
            f"Cannot tell what {str(path)!r} holds. Use .jsonl or .jsonl.gz (one JSON object a "
            f"line with {_FIELDS}), or .txt (one text)."
        )
    try:
        text = path.read_text(encoding="utf8")
    except (UnicodeDecodeError, OSError) as error:
        raise ReferenceSetError(f"Cannot read {str(path)!r}: {error}.") from None
    if not text.strip():
        raise ReferenceSetError(f"{str(path)!r} holds no examples: it is empty.")
    yield Example(completion=text)


def _parse(path: Path, number: int, line: str) -> Example:
    try:
        return Example.of(json.loads(line))
    except json.JSONDecodeError as error:
        raise ReferenceSetError(f"{path}, line {number}: not JSON ({error.msg}).") from None
    except ReferenceSetError as error:
        raise ReferenceSetError(f"{path}, line {number}: {error}.") from None


@dataclass(frozen=True)
class Tokens:
    """An example's token ids; those from `completion_start` on are its completion."""

    ids: list[int]
    completion_start: int


def tokenise(example: Example, tokenizer: Any) -> Tokens:
    """Return the tokens of an example, as `tokenizer` gives them for the whole text."""
    if example.messages is not None:
        return _tokenise_messages(example.messages, tokenizer)
    if not example.prompt:
        return Tokens(list(tokenizer(example.completion)["input_ids"]), 0)
    text = example.prompt + example.completion
    if not tokenizer.is_fast:
        ids = list(tokenizer(text)["input_ids"])
        return Tokens(ids, _count_shared(ids, tokenizer(example.prompt)["input_ids"]))
    encoded = tokenizer(text, return_offsets_mapping=True)
    boundary = len(example.prompt)
    # A token that straddles the boundary helps to spell the completion. Special tokens span (0, 0).
    starts = (place for place, (_, end) in enumerate(encoded["offset_mapping"]) if end > boundary)
    ids = list(encoded["input_ids"])
    return Tokens(ids, next(starts, len(ids)))


def _tokenise_messages(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> Tokens:
    """Apply the model's chat template; the last assistant turn is the completion."""
    ids = _apply_template(tokenizer, messages, generation=False)
    if messages[-1]["role"] != "assistant":
        return Tokens(ids, len(ids))
    return Tokens(
        ids, _count_shared(ids, _apply_template(tokenizer, messages[:-1], generation=True))
    )


def tokenise_prompt(prompt: str | Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt that is to be answered: a text, or chat messages."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return _apply_template(tokenizer, prompt, generation=True)


def _count_shared(ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Count the tokens that two sequences have in common at their beginning."""
    pairs = zip(ids, prompt, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(prompt)))


def _apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], generation: bool
) -> list[int]:
    if not messages:
        return []
    if getattr(tokenizer, "chat_template", None) is None:
        raise ReferenceSetError(
            "The examples are chat messages, but the tokenizer has no chat template. "
            "Give prompt and completion instead, or set tokenizer.chat_template."
        )
    from jinja2 import TemplateError

    try:
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=generation,
            tokenize=True,
            return_dict=True,
        )
    except TemplateError as error:
        raise ReferenceSetError(f"The chat template refused a conversation: {error}.") from None
    return list(encoded["input_ids"])
