"""The text of an answer as its tokens come: whole characters, and nothing from a stop string on.

Knows tokenizers; nothing of HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from knn_moe.serve.sampling import Token
from knn_moe.support.characters import CharacterStream


@dataclass(frozen=True)
class Placed:
    """A token and where its text begins in the answer, in characters."""

    token: Token
    offset: int


@dataclass(frozen=True)
class Piece:
    """A part of an answer: its text and the tokens that are told with it; the reason, if the
    answer ends with it ("stop" or "length")."""

    text: str = ""
    tokens: tuple[Placed, ...] = ()
    reason: str | None = None


class StopSearch:
    """Finds stop strings in a text that comes in parts. What may be the beginning of one is held
    back until it is known."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return what is certain to come before a stop string."""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            given, self._held = self._held[: min(places)], ""
            return given
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        given, self._held = self._held[: len(self._held) - keep], self._held[-keep:] * bool(keep)
        return given

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`, and is not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


class AnswerText:
    """The text of one answer.

    Args:
        tokenizer: The model's.
        stops: Strings that end the answer, and are no part of it.
        ends: Tokens that end the answer, and are no part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], ends: frozenset[int]) -> None:
        self._characters = CharacterStream(tokenizer, skip_special_tokens=True)
        self._search = StopSearch(stops)
        self._ends = ends
        self._decoded = 0  # characters
        self._given = 0
        self._tokens: deque[Placed] = deque()
        self.count = 0  # tokens, with the one that ended the answer
        self.ended = False

    def push(self, token: Token) -> Piece:
        """Take a token, and return what it adds; with a reason, if the answer ends here."""
        self.count += 1
        if token.id in self._ends:
            return self.finish("stop")
        self._tokens.append(Placed(token, self._decoded))
        piece = self._add(self._characters.push(token.id))
        return self._end("stop", piece) if self._search.found else self._release(piece)

    def finish(self, reason: str = "length") -> Piece:
        """End the answer, and return what was held back."""
        text = self._add(self._characters.finish())
        if self._search.found:
            return self._end("stop", text)
        text += self._search.finish()
        self.ended = True
        self._given += len(text)
        tokens, self._tokens = tuple(self._tokens), deque()
        return Piece(text, tokens, reason)

    def _add(self, text: str) -> str:
        self._decoded += len(text)
        return self._search.push(text)

    def _release(self, text: str, reason: str | None = None) -> Piece:
        """Return `text`, with the tokens whose text begins before its end."""
        self._given += len(text)
        tokens = []
        while self._tokens and self._tokens[0].offset < self._given:
            tokens.append(self._tokens.popleft())
        return Piece(text, tuple(tokens), reason)

    def _end(self, reason: str, text: str) -> Piece:
        self.ended = True
        return self._release(text, reason)


def token_text(tokenizer: Any, id: int) -> str:
    """Return the text of one token by itself."""
    return str(tokenizer.decode([id]))


def token_bytes(tokenizer: Any, id: int) -> list[int] | None:
    """Return the bytes of one token, which may be a part of a character; None: not known."""
    text = token_text(tokenizer, id)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return list(text.encode())
    name = tokenizer.convert_ids_to_tokens(id)
    if name.startswith("<0x") and name.endswith(">"):
        return [int(name[3:-1], 16)]
    if all(letter in _BYTES for letter in name):
        return [_BYTES[letter] for letter in name]
    return None


def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTES: Final = _byte_letters()
