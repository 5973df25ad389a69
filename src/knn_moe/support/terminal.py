"""Make text of unknown origin safe to print: models, memories, paths and tokens may hold anything.

A terminal obeys control characters and escape sequences, and characters that turn the direction of
writing can make text look like something else. They are replaced, never obeyed.
"""

from __future__ import annotations

import unicodedata
from typing import Final

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_SYMBOLS: Final = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
# Joiners, which emoji and several scripts need, are invisible and harmless.
_JOINERS: Final = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"


def printable(text: str) -> str:
    """Return text without terminal commands; new lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(letter if _is_safe(letter) else _REPLACEMENT for letter in text)


def one_line(text: str) -> str:
    """Return text without terminal commands, and symbols in place of new lines and tabs."""
    return printable("".join(_SYMBOLS.get(letter, letter) for letter in text))


def printable_json(text: str) -> str:
    """Return JSON in which what a terminal would obey is escaped; it still says the same."""
    if text.isprintable():
        return text
    return "".join(letter if _is_safe(letter) else _escape(letter) for letter in text)


def _is_safe(letter: str) -> bool:
    shown = letter.isprintable() or letter in "\n\t" or letter in _JOINERS
    return shown or unicodedata.category(letter) == "Zs"


def _escape(letter: str) -> str:
    """Return the letter as JSON escapes it: one or two UTF-16 units."""
    data = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at]:02x}{data[at + 1]:02x}" for at in range(0, len(data), 2))
