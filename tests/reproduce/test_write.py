"""Tables as Markdown, LaTeX, SVG and JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from knn_moe.errors import RunError
from knn_moe.reproduce.paper import PAPER
from knn_moe.reproduce.table import (
    Cell,
    Chart,
    Series,
    Table,
    make_row,
    number,
    percent,
    points,
)
from knn_moe.reproduce.write import read_table, to_latex, to_markdown, write_table


def make_table() -> Table:
    return Table(
        name="a",
        title="A_table",
        columns=("what", "how % much"),
        rows=(make_row("one & two", percent(0.1234, "†")), make_row("none", number(None, ".2f"))),
        charts=(Chart("lines", ("x", "y"), (Series("s", (1.0, None)),), "axis"),),
        paper=PAPER["selective"],
    )


def test_a_table_in_every_format(tmp_path: Path) -> None:
    table = make_table()
    text = to_markdown(table)
    assert "| one & two | 12.34† |" in text
    assert "| kNN-MoE (Selective) | 30.30 | 47.85 | 35.41 |" in text
    tex = to_latex(table)
    assert r"one \& two & 12.34$^{\dagger}$ \\" in tex
    assert r"A\_table" in tex
    write_table(table, tmp_path)
    first = (tmp_path / "a.svg").read_bytes()
    write_table(table, tmp_path)
    assert (tmp_path / "a.svg").read_bytes() == first
    assert read_table(tmp_path, "a") == table
    assert read_table(tmp_path, "b") is None
    (tmp_path / "a.json").write_text("{}", encoding="utf8")
    with pytest.raises(RunError, match="format None"):
        read_table(tmp_path, "a")
    assert [path.name for path in tmp_path.glob("*new*")] == []


def test_cells_show_their_numbers() -> None:
    assert points(-0.012) == Cell("-1.20", pytest.approx(-1.2))
    assert number(float("nan"), ".2f").text == "-"
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        Table(name="a", title="a", columns=("one",), rows=(make_row("a", "b"),))
