"""Look things up by name, with one answer to an unknown name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from knn_moe.errors import ConfigError, KnnMoeError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A read-only mapping whose `find` names the close match and the alternatives.

    Args:
        kind: What the names stand for, in the singular: "task", "method".
        entries: The things by name.
        error: The exception that `find` raises.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, T], error: type[KnnMoeError] = ConfigError
    ) -> None:
        self.kind = kind
        self.error = error
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str, hint: str = "") -> T:
        """Return the entry called `name`.

        Raises:
            KnnMoeError: There is none; the registry's own `error`, followed by `hint`.
        """
        if name not in self._entries:
            raise self.error(f"{unknown_name(self.kind, name, self._entries)}{hint}")
        return self._entries[name]


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the sentence that answers an unknown name: what, the close match, the alternatives."""
    names = list(known)
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {kind} {name!r}.{hint} Available: {', '.join(names)}."
