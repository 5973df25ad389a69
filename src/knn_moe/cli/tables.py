"""Tables for terminals of any width: columns are stacked where they do not fit, and never cut."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from knn_moe.support.terminal import printable

_UNLIMITED: Final = 100_000  # characters in a line where there is no terminal
_NARROW: Final = 12  # a column of text is not made narrower than that if its words are short


def print_table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    names: int | None = None,
) -> None:
    """Print a table to stdout, numbers right-aligned, under a title of one line.

    Text is broken between words where the table is too wide. If that is not enough, the columns are
    stacked: the table continues below itself with the columns that are left.

    Args:
        title: What the table shows.
        columns: The names of the columns.
        rows: A cell for each column.
        names: So many columns on the left name a row, and are repeated when columns are stacked.
            None: those before the first that holds numbers, or the first.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    made = [_Column.of(name, [row[place] for row in cells]) for place, name in enumerate(columns)]
    if names is None:
        first = (place for place, column in enumerate(made) if column.numeric)
        names = max(1, next(first, 1))
    if title is not None:
        Console(highlight=False).print(plain(title), style="italic", soft_wrap=True)
    width = line_width()
    for broken, boxed in product((False, True), (True, False)):
        widths = _fit(made, width, boxed=boxed, broken=broken)
        if widths is not None:
            _print(made, widths, boxed=boxed)
            return
    for number, block in enumerate(_stack(made, names, width)):
        if number:
            click.echo()
        _print(block, _fit(block, width) or [column.least for column in block])


def print_paragraph(text: str) -> None:
    """Print a sentence to stdout, broken between words where the line ends."""
    Console(highlight=False, width=line_width()).print(plain(text))


def line_width() -> int:
    """Return how many characters a line may have, as COLUMNS or the terminal says."""
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()):
        return _UNLIMITED
    return shutil.get_terminal_size().columns


def plain(text: object) -> Text:
    """Return text for rich that is neither markup nor a command to the terminal."""
    return Text(printable(str(text)))


@dataclass(frozen=True)
class _Column:
    """A column, the width it takes in full, and the width it needs at least."""

    name: str
    cells: list[str]
    numeric: bool
    most: int
    least: int

    @classmethod
    def of(cls, name: str, cells: list[str]) -> _Column:
        name = printable(name)
        numeric = all(map(_is_number, cells))
        lines = [line for cell in cells for line in cell.splitlines()]
        longest = _widest(lines)
        least = longest  # a number is not broken
        if not numeric:
            least = max(
                _widest(word for line in lines for word in line.split()), min(longest, _NARROW)
            )
        most = max(longest, _widest(name.splitlines()))
        return cls(name, cells, numeric, most, max(least, _widest(name.split())))


def _widest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _is_number(cell: str) -> bool:
    text = cell.replace(",", "").replace("%", "").replace("×", "").strip()
    try:
        float(text.split()[0] if text else "x")
    except ValueError:
        return text in ("", "-")
    return True


def _fit(
    columns: Sequence[_Column], width: int, *, boxed: bool = False, broken: bool = True
) -> list[int] | None:
    """Return the columns' widths, long texts `broken` between words; None: they do not fit."""
    lines = 3 * len(columns) + 1 if boxed else 2 * (len(columns) - 1)
    widths = [column.most for column in columns]
    while (spare := width - lines - sum(widths)) < 0:
        able = [place for place, column in enumerate(columns) if widths[place] > column.least]
        if not (able and broken):
            return None
        widest = max(able, key=lambda place: widths[place])
        widths[widest] = max(columns[widest].least, widths[widest] + spare)
    return widths


def _stack(columns: list[_Column], names: int, width: int) -> list[list[_Column]]:
    """Return the columns in blocks that fit, each with the columns that name a row."""
    named, rest = columns[:names], columns[names:]
    blocks: list[list[_Column]] = [[]]
    for column in rest:
        if blocks[-1] and _fit([*named, *blocks[-1], column], width) is None:
            blocks.append([])
        blocks[-1].append(column)
    return [[*named, *block] for block in blocks]


def _print(columns: Sequence[_Column], widths: Sequence[int], *, boxed: bool = False) -> None:
    style = box.HEAVY_HEAD if boxed else box.SIMPLE_HEAD
    table = Table(
        header_style="bold", box=style, show_edge=boxed, pad_edge=boxed, padding=(0, int(boxed))
    )
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            plain(column.name), justify="right" if column.numeric else "left", width=width
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(plain, row))
    Console(highlight=False, width=sum(widths) + 3 * len(columns) + 1).print(table)
