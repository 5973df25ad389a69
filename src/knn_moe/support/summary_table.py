"""Small tables of results, as a notebook shows them and as text. Knows cells, nothing of results.

Colours are those of whatever is around the table, so that it can be read in light and in dark
notebooks. All texts are escaped: names of models, tasks and files may hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from rich.cells import cell_len

from knn_moe.support.terminal import one_line

_TABLE: Final = (
    "border-collapse: collapse; color: inherit; background: none; "
    "font-variant-numeric: tabular-nums"
)
_CAPTION: Final = (
    "caption-side: top; text-align: left; color: inherit; font-weight: 600; white-space: nowrap"
)
_CELL: Final = "padding: 0.15em 0.7em 0.15em 0; color: inherit; background: none; border: 0"
_HEAD: Final = "; border-bottom: 1px solid currentcolor; vertical-align: bottom"
_WHOLE: Final = "; white-space: nowrap"  # of a cell without spaces, which has hyphens at most
_WIDTH: Final = 80  # columns of a terminal
_PLAIN: Final = "; font-weight: normal"
_NOTE: Final = "margin: 0.3em 0; max-width: 70ch"


@dataclass(frozen=True, kw_only=True)
class SummaryTable:
    """A table under a title. The first `texts` columns hold texts, the others numbers.

    Without `columns` it has no line of headings. `notes` are sentences below it.
    """

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]]
    texts: int = 1
    notes: Sequence[str] = ()

    def to_html(self) -> str:
        """Return a piece of HTML that scrolls in its own box if it is wide."""
        head = f"<thead><tr>{self._cells(self.columns, 'col')}</tr></thead>" if self.columns else ""
        body = "".join(f"<tr>{self._cells(row, 'row')}</tr>" for row in self.rows)
        notes = "".join(f'<p style="{_NOTE}">{_safe(note)}</p>' for note in self.notes)
        caption = f'<caption style="{_CAPTION}">{_safe(self.title)}</caption>'
        table = f'<table style="{_TABLE}">{caption}{head}<tbody>{body}</tbody></table>'
        return f'<div style="overflow-x: auto">{table}{notes}</div>'

    def _cells(self, texts: Sequence[str], scope: str) -> str:
        """Return a line: of headings over columns, or of a heading and what it is about."""
        cells = []
        for place, text in enumerate(texts):
            tag = "th" if scope == "col" or place == 0 else "td"
            kind = f'th scope="{scope}"' if tag == "th" else tag
            style = f"{_CELL}{_HEAD if scope == 'col' else _PLAIN}"
            style += f"; text-align: {'left' if place < self.texts else 'right'}"
            style += "" if " " in text else _WHOLE
            cells.append(f'<{kind} style="{style}">{_safe(text)}</{tag}>')
        return "".join(cells)

    def to_text(self) -> str:
        """Return lines of text: columns, or a line for each number where columns are too wide."""
        head = [one_line(name) for name in self.columns]
        rows = [[one_line(cell) for cell in row] for row in self.rows]
        widths = [max(map(cell_len, column)) for column in zip(*_filled(head, rows), strict=True)]
        if head and sum(widths) + 2 * (len(widths) - 1) > _WIDTH:
            lines = self._stacked(head, rows)
        else:
            lines = [self._aligned(row, widths) for row in _filled(head, rows)]
        return "\n".join([one_line(self.title), *lines, *map(one_line, self.notes)])

    def _aligned(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = zip(row, widths, strict=True)
        filled = [_fill(cell, width, left=n < self.texts) for n, (cell, width) in enumerate(cells)]
        return "  ".join(filled).rstrip()

    def _stacked(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        names, wide = head[self.texts :], max(map(cell_len, head[self.texts :]), default=0)
        lines = []
        for row in rows:
            lines.append(", ".join(row[: self.texts]))
            for name, cell in zip(names, row[self.texts :], strict=True):
                lines.append(f"  {_fill(name, wide, left=True)}  {cell}")
        return lines


def _filled(head: list[str], rows: list[list[str]]) -> list[list[str]]:
    return [head, *rows] if head else rows


def _fill(cell: str, width: int, *, left: bool) -> str:
    space = " " * (width - cell_len(cell))
    return cell + space if left else space + cell


def _safe(text: str) -> str:
    return escape(one_line(text))
