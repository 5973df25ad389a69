"""Turn tokens into text by characters: a character may be spread over several tokens.

Many tokenizers work on bytes, and a token may end inside a character. Decoded alone it shows
replacement characters (`don���t`). Here each token gets the characters that it completes. Knows
only that a tokenizer decodes ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def half_of_character(text: str) -> str | None:
    """Return the first half of a character in `text`, which no tokenizer reads, or None.

    JSON can hold one, and so can an argument that is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


class Decodes(Protocol):
    """A tokenizer, as far as it is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class CharacterStream:
    """Decode tokens one by one, as a model generates them.

    Args:
        tokenizer: The model's.
        skip_special_tokens: Leave out tokens such as the end of a text.
    """

    def __init__(self, tokenizer: Decodes, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Some tokenizers drop a text's first space, so that tokens are decoded after others.
        self._context: list[int] = []
        self._pending: list[int] = []  # the tokens after the context
        self._given = ""  # the text of both, as far as it was returned

    def push(self, token: int) -> str:
        """Return the characters that `token` completes: "" where it ends inside the first one."""
        self._pending.append(token)
        text = self._decode([*self._context, *self._pending])
        complete = text.rstrip(_REPLACEMENT)
        new = complete[len(self._given) :]
        if new:
            self._given = complete
        if new and complete == text:
            self._context, self._pending = self._pending, []
            self._given = self._decode(self._context)
        return new

    def finish(self) -> str:
        """Return what is left: replacement characters, if the tokens end inside a character."""
        rest = self._decode([*self._context, *self._pending])[len(self._given) :]
        self._context, self._pending, self._given = [], [], ""
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


def character_pieces(tokenizer: Decodes, ids: Iterable[int]) -> list[str]:
    """Return for each token the characters that it completes; joined, they are the whole text.

    A token that ends inside its first character gets "", and the token that completes the
    character gets all of it. Where the text ends inside a character, the last token gets
    replacement characters.
    """
    stream = CharacterStream(tokenizer)
    pieces = [stream.push(int(token)) for token in ids]
    if pieces:
        pieces[-1] += stream.finish()
    return pieces
