"""The reference set: examples, and the tokens they become.

Knows text, chat templates and tokenizers. Knows nothing of files (load.py) or models.

An example is a plain text, a prompt with its completion, or chat messages. A plain text is
tokenised exactly as `tokenizer(text)` does it; a prompt and completion as the joined text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.forms import read_form, read_turns


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
    def of(cls, item: ExampleLike, columns: Mapping[str, str] | None = None) -> Example:
        """Make an example of a string, a mapping in one of the known forms, or chat messages.

        Args:
            columns: The name that a field of the form has in a mapping.

        Raises:
            ReferenceSetError: It is something else; the message is the end of a sentence.
        """
        if isinstance(item, Mapping):
            return cls(**read_form(item, columns))
        if columns:
            raise ReferenceSetError(
                f"must have columns, because some were named; it is a {type(item).__name__}"
            )
        if isinstance(item, Example):
            return item
        if isinstance(item, str):
            return cls(completion=item)
        turns = read_turns(item)
        if turns is not None:
            return cls(messages=turns)
        raise ReferenceSetError(
            f"must be a text, a mapping of columns, or chat messages; got {type(item).__name__}"
        )


ExampleLike: TypeAlias = Example | str | Mapping[str, Any] | Sequence[Any]


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
    except (TemplateError, TypeError) as error:  # TypeError: a content that is no text
        raise ReferenceSetError(f"The chat template refused a conversation: {error}.") from None
    return list(encoded["input_ids"])
