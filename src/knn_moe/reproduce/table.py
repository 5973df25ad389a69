"""A table of results: cells that know their number, and what the paper printed beside it.

Knows nothing of models, methods or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from knn_moe.errors import RunError

FORMAT: Final = 1
NOTHING: Final = "-"


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number behind it."""

    text: str
    value: float | None = None
    change: Mapping[str, float] | None = None  # against zero-shot: difference, low, high, p


@dataclass(frozen=True)
class Series:
    """A line or a set of bars: a value for each place, None where there is none."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """What of a table is drawn. `places`: what the values stand over."""

    kind: str  # bars or lines
    places: tuple[str, ...]
    series: tuple[Series, ...]
    axis: str
    title: str = ""  # of this panel, where there are several


@dataclass(frozen=True)
class Printed:
    """The paper's own numbers, of its models and its data."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table, measured."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    paper: Printed | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # model, data, hardware, versions, seeds

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.name}: {len(row)} cells under {len(self.columns)} heads.")

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Table:
        if known.get("format") != FORMAT:
            raise RunError(f"A table has format {known.get('format')}, not {FORMAT}.")
        charts = [
            Chart(
                **{
                    **chart,
                    "places": tuple(chart["places"]),
                    "series": tuple(
                        Series(one["name"], tuple(one["values"])) for one in chart["series"]
                    ),
                }
            )
            for chart in known["charts"]
        ]
        paper = known["paper"]
        return cls(
            name=known["name"],
            title=known["title"],
            columns=tuple(known["columns"]),
            rows=tuple(tuple(Cell(**cell) for cell in row) for row in known["rows"]),
            notes=tuple(known["notes"]),
            charts=tuple(charts),
            paper=None
            if paper is None
            else Printed(
                paper["caption"],
                tuple(paper["columns"]),
                tuple(tuple(row) for row in paper["rows"]),
            ),
            facts=known["facts"],
        )


def nothing() -> Cell:
    """What was not measured, or is not defined."""
    return Cell(NOTHING)


def number(value: float | None, form: str, mark: str = "") -> Cell:
    """A number in a format such as ".2f"; `mark` goes behind it."""
    if value is None or not math.isfinite(value):
        return nothing()
    return Cell(f"{value:{form}}{mark}", value)


def percent(share: float | None, mark: str = "") -> Cell:
    """A share as the paper writes accuracies."""
    return nothing() if share is None else number(100 * share, ".2f", mark)


def points(difference: float | None, mark: str = "") -> Cell:
    """A difference of shares, in points."""
    return nothing() if difference is None else number(100 * difference, "+.2f", mark)


def row(*cells: Cell | str) -> tuple[Cell, ...]:
    return tuple(Cell(cell) if isinstance(cell, str) else cell for cell in cells)


def values(cells: Sequence[Cell]) -> tuple[float | None, ...]:
    return tuple(cell.value for cell in cells)
