"""Write a table as JSON, Markdown, LaTeX and SVG. The only file here that imports matplotlib."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from knn_moe.errors import MissingDependencyError, RunError
from knn_moe.reproduce.table import Chart, Table
from knn_moe.support.files import write_whole

_NOT_OURS: Final = "The paper's numbers, for its own models and data; not measured here."
_COLOURS: Final = (
    "#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c",
    "#ccb974", "#64b5cd", "#1f3b66", "#a65628", "#2f6b3a",
)  # fmt: skip
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_LATEX: Final = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "°": r"$^{\circ}$",
    "†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$", "±": r"$\pm$", "Σ": r"$\Sigma$", "₁": r"$_1$",
    "<": "$<$", ">": "$>$",
}  # fmt: skip


def write_table(table: Table, folder: Path) -> None:
    """Write NAME.md, NAME.tex, NAME.json and, if the table has charts, NAME.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    if table.charts:
        write_whole(folder / f"{table.name}.svg", _draw(table))
    write_whole(folder / f"{table.name}.md", to_markdown(table))
    write_whole(folder / f"{table.name}.tex", to_latex(table))
    # Last, because a table counts as done once this file is there.
    text = json.dumps(table.to_dict(), indent=1, ensure_ascii=False)
    write_whole(folder / f"{table.name}.json", f"{text}\n")


def read_table(folder: Path, name: str) -> Table | None:
    """Return a table that was written before, or None.

    Raises:
        RunError: The file is not a table of this version.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        return Table.from_dict(json.loads(path.read_text(encoding="utf8")))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{str(path)!r} is not a table ({error}). Remove it.") from None


def write_all_tables(tables: Sequence[Table], folder: Path) -> None:
    """Write all tables into one file, tables.md."""
    write_whole(folder / "tables.md", "\n".join(to_markdown(table, level=2) for table in tables))


def to_markdown(table: Table, level: int = 1) -> str:
    """Return the table, the paper's own below it, and how it was measured."""
    parts = [f"{'#' * level} {table.title}", ""]
    parts += [*table.notes, ""] if table.notes else []
    parts += [_markdown_grid(table.columns, _texts(table)), ""]
    if table.charts:
        parts += [f"![{table.title}]({table.name}.svg)", ""]
    if table.paper is not None:
        parts += [f"{_NOT_OURS} {table.paper.caption}", ""]
        parts += [_markdown_grid(table.paper.columns, table.paper.rows), ""]
    parts += [_describe_measurement(table), ""]
    return "\n".join(parts)


def _texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in cells] for cells in table.rows]


def _describe_measurement(table: Table) -> str:
    facts = table.facts
    tasks = "; ".join(f"{name}: {text}" for name, text in facts.get("tasks", {}).items())
    versions = ", ".join(f"{name} {text}" for name, text in facts.get("versions", {}).items())
    models = ", ".join(facts.get("models", ()))
    jobs = facts.get("jobs", 1)
    prepared = f"with preset {facts['preset']}" if facts.get("preset") else "calibrated"
    beside = f", {jobs} processes side by side" if jobs > 1 else ""
    return (
        f"Measured on {models}, {facts.get('dtype')}, with {facts.get('hardware')}{beside}; seed "
        f"{facts.get('seed')}, batches of {facts.get('batch_size')}, kNN-MoE {prepared}. {tasks}. "
        f"{versions}."
    )


def _markdown_grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_latex(table: Table) -> str:
    """Return two tables in booktabs' style: the measured one, and the paper's."""
    caption = f"{table.title}. {' '.join(table.notes)} {_describe_measurement(table)}"
    parts = [_latex_table(table.columns, _texts(table), caption)]
    if table.paper is not None:
        caption = f"{table.title}. {_NOT_OURS} {table.paper.caption}"
        parts.append(_latex_table(table.paper.columns, table.paper.rows, caption))
    return "\n\n".join(parts) + "\n"


def _latex_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    lines = [r"\begin{table}[h]", r"\centering", rf"\begin{{tabular}}{{{'l' * len(columns)}}}"]
    lines += [r"\toprule", _latex_row(columns), r"\midrule", *map(_latex_row, rows)]
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{_escape(caption)}}}", r"\end{table}"]
    return "\n".join(lines)


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_escape, cells)) + r" \\"


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _draw(table: Table) -> str:
    """Return an SVG picture with a panel for each chart, one below the other."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "A plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(9.0, 3.2 * len(table.charts)), layout="constrained")
    for place, chart in enumerate(table.charts, start=1):
        axes = figure.add_subplot(len(table.charts), 1, place)
        axes.spines[["top", "right"]].set_visible(False)
        _draw_chart(axes, chart)
        axes.set_xticks(range(len(chart.places)), chart.places)
        axes.set_ylabel(chart.axis)
        axes.set_title(chart.title, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    picture = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "knn-moe"}):  # the same picture, byte for byte
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


def _draw_chart(axes: Any, chart: Chart) -> None:
    width = 0.84 / max(len(chart.series), 1)  # of a bar
    for number, series in enumerate(chart.series):
        style = {"color": _COLOURS[number % len(_COLOURS)], "label": series.name}
        known = [(place, y) for place, y in enumerate(series.values) if y is not None]
        places, heights = [place for place, _ in known], [y for _, y in known]
        if chart.kind == "lines":
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(places, heights, marker=marker, markersize=4, **style)
        else:
            shift = (number - (len(chart.series) - 1) / 2) * width
            axes.bar([place + shift for place in places], heights, width=0.94 * width, **style)
    if chart.kind == "lines":
        axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    else:
        axes.axhline(0, color="black", linewidth=0.6)
