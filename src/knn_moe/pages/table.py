"""A table of a page: cells in words for readers, with values to sort by and for a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import quote

Value: TypeAlias = str | float | None
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # how a text begins that Excel computes


@dataclass(frozen=True)
class Column:
    """A column of a table; `names` are those of its values in the CSV file."""

    title: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A cell: what it says, the lines below that, and its values; it sorts by the first."""

    text: str
    values: tuple[Value, ...]
    notes: tuple[str, ...] = ()
    verdict: str | None = None


@dataclass(frozen=True)
class Table:
    """A table whose column number `header` says what each row is about.

    `name`: of the file that is downloaded, without its ending.
    """

    name: str
    label: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    header: int = 0

    def has_words(self, place: int) -> bool:
        """Return whether a column has texts rather than numbers."""
        return any(isinstance(row[place].values[0], str) for row in self.rows)

    @property
    def csv(self) -> str:
        """Return all values as comma-separated values, numbers as exactly as they are known."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([name for column in self.columns for name in column.names])
        for row in self.rows:
            writer.writerow([_plain(value) for cell in row for value in cell.values])
        return text.getvalue()

    @property
    def address(self) -> str:
        """Return the CSV file as an address that a page links to without a network."""
        return f"data:text/csv;charset=utf-8,{quote(self.csv, errors='replace')}"


def _plain(value: Value) -> Value:
    """Return a value that a spreadsheet shows as it is: a name is never computed."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
