"""A table of results: cells with their numbers, charts, and the paper's own table beside it.

Knows nothing of models, methods or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from knn_moe.errors import RunError

FORMAT: Final = 1
NO_VALUE: Final = "-"


@dataclass(frozen=True)
class Cell:
    """A text, and the number behind it."""

    text: str
    value: float | None = None
    change: Mapping[str, Any] | None = None  # against zero-shot: as Comparison has it


@dataclass(frozen=True)
class Series:
    """One line or one set of bars of a chart: a value for each place, or None."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """A chart of a table's numbers."""

    kind: str  # "bars" or "lines"
    places: tuple[str, ...]  # labels of the horizontal axis
    series: tuple[Series, ...]
    axis: str  # label of the vertical axis
    title: str = ""


@dataclass(frozen=True)
class PrintedTable:
    """A table of the paper, for its own models and data."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of measured results."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    paper: PrintedTable | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # model, data, hardware, versions, seeds

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.name}: a row has {len(row)} cells for {len(self.columns)} columns."
                )

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Table:
        """Return the table that `to_dict` described.

        Raises:
            RunError: It has another format.
        """
        if known.get("format") != FORMAT:
            raise RunError(f"A table has format {known.get('format')}, not {FORMAT}.")
        rows = [tuple(Cell(**cell) for cell in row) for row in known["rows"]]
        charts = [_read_chart(chart) for chart in known["charts"]]
        paper = known["paper"] and PrintedTable(
            known["paper"]["caption"],
            tuple(known["paper"]["columns"]),
            tuple(tuple(row) for row in known["paper"]["rows"]),
        )
        return cls(
            name=known["name"],
            title=known["title"],
            columns=tuple(known["columns"]),
            rows=tuple(rows),
            notes=tuple(known["notes"]),
            charts=tuple(charts),
            paper=paper,
            facts=known["facts"],
        )


def _read_chart(known: Mapping[str, Any]) -> Chart:
    series = tuple(Series(one["name"], tuple(one["values"])) for one in known["series"])
    return Chart(**{**known, "places": tuple(known["places"]), "series": series})


def no_value() -> Cell:
    """Return the cell of something that was not measured or is not defined."""
    return Cell(NO_VALUE)


def number(value: float | None, form: str, mark: str = "") -> Cell:
    """Return a number in a format such as ".2f", with `mark` behind it."""
    if value is None or not math.isfinite(value):
        return no_value()
    return Cell(f"{value:{form}}{mark}", value)


def percent(share: float | None, mark: str = "") -> Cell:
    """Return a share in percent, as the paper prints accuracies."""
    return no_value() if share is None else number(100 * share, ".2f", mark)


def unparsed(share: float | None) -> str:
    """Return how many outputs had no answer, for the end of a cell; nothing if all had one."""
    return f" ({share:.0%} unparsed)" if share else ""


def points(difference: float | None, mark: str = "") -> Cell:
    """Return a difference of shares in percentage points."""
    return no_value() if difference is None else number(100 * difference, "+.2f", mark)


def make_row(*cells: Cell | str) -> tuple[Cell, ...]:
    return tuple(Cell(cell) if isinstance(cell, str) else cell for cell in cells)


def values_of(cells: Sequence[Cell]) -> tuple[float | None, ...]:
    return tuple(cell.value for cell in cells)
