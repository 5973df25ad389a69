"""A table as JSON, Markdown, LaTeX and a picture. The only file here that imports matplotlib.

Everything is written beside and renamed: what is there is whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from knn_moe.errors import MissingDependencyError, RunError
from knn_moe.reproduce.table import Chart, Table
from knn_moe.support.files import write_whole

THE_PAPERS: Final = "The paper's numbers, of its own models and data; not measured here."
_COLOURS: Final = (
    "#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c",
    "#ccb974", "#64b5cd", "#1f3b66", "#a65628", "#2f6b3a",
)  # fmt: skip
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_SPECIAL: Final = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$", "±": r"$\pm$", "Σ": r"$\Sigma$", "₁": r"$_1$",
    "<": "$<$", ">": "$>$",
}  # fmt: skip


def write_table(table: Table, folder: Path) -> None:
    """NAME.json, NAME.md, NAME.tex and, where there is something to draw, NAME.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    if table.charts:
        _draw(table, folder / f"{table.name}.svg")
    write_whole(folder / f"{table.name}.md", markdown(table))
    write_whole(folder / f"{table.name}.tex", latex(table))
    # Last: a table counts as done by this file.
    text = json.dumps(table.to_dict(), indent=1, ensure_ascii=False)
    write_whole(folder / f"{table.name}.json", f"{text}\n")


def read_table(folder: Path, name: str) -> Table | None:
    """A table written before, if it is there."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        return Table.from_dict(json.loads(path.read_text(encoding="utf8")))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{str(path)!r} holds no table ({error}): remove it.") from None


def write_page(tables: Sequence[Table], folder: Path) -> None:
    """All tables on one page, tables.md."""
    write_whole(folder / "tables.md", "\n".join(markdown(table, level=2) for table in tables))


def markdown(table: Table, level: int = 1) -> str:
    """With the paper's own numbers below, and how it was measured."""
    parts = [f"{'#' * level} {table.title}", ""]
    parts += [*table.notes, ""] if table.notes else []
    parts += [_grid(table.columns, [[cell.text for cell in cells] for cells in table.rows]), ""]
    if table.charts:
        parts += [f"![{table.title}]({table.name}.svg)", ""]
    if table.paper is not None:
        parts += [f"{THE_PAPERS} {table.paper.caption}", ""]
        parts += [_grid(table.paper.columns, table.paper.rows), ""]
    parts += [_how(table), ""]
    return "\n".join(parts)


def _how(table: Table) -> str:
    facts = table.facts
    tasks = "; ".join(f"{name}: {said}" for name, said in facts.get("tasks", {}).items())
    versions = ", ".join(f"{name} {said}" for name, said in facts.get("versions", {}).items())
    models = ", ".join(facts.get("models", ()))
    jobs = facts.get("jobs", 1)
    beside = f", {jobs} processes side by side" if jobs > 1 else ""
    return (
        f"Measured on {models}, {facts.get('dtype')}, with {facts.get('hardware')}{beside}; seed "
        f"{facts.get('seed')}, batches of {facts.get('batch_size')}, kNN-MoE by preset "
        f"{facts.get('preset')}. {tasks}. {versions}."
    )


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def latex(table: Table) -> str:
    """Two tabulars in booktabs' style: what was measured, and the paper's."""
    notes = " ".join(table.notes)
    rows = [[cell.text for cell in cells] for cells in table.rows]
    parts = [_tabular(table.columns, rows, f"{table.title}. {notes} {_how(table)}")]
    if table.paper is not None:
        caption = f"{table.title}. {THE_PAPERS} {table.paper.caption}"
        parts.append(_tabular(table.paper.columns, table.paper.rows, caption))
    return "\n\n".join(parts) + "\n"


def _tabular(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    lines = [r"\begin{table}[h]", r"\centering", rf"\begin{{tabular}}{{{'l' * len(columns)}}}"]
    lines += [r"\toprule", _line(columns), r"\midrule", *map(_line, rows), r"\bottomrule"]
    lines += [r"\end{tabular}", rf"\caption{{{_escaped(caption)}}}", r"\end{table}"]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(_escaped, cells)) + r" \\"


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


def _draw(table: Table, path: Path) -> None:
    """A panel for each chart, one below the other."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "A plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(9.0, 3.2 * len(table.charts)), layout="constrained")
    for place, chart in enumerate(table.charts):
        axes = figure.add_subplot(len(table.charts), 1, place + 1)
        axes.spines[["top", "right"]].set_visible(False)
        (_lines if chart.kind == "lines" else _bars)(axes, chart)
        axes.set_xticks(range(len(chart.places)), chart.places)
        axes.set_ylabel(chart.axis)
        axes.set_title(chart.title, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    scratch = path.with_name(f"new-{path.name}")
    with mpl.rc_context({"svg.hashsalt": "knn-moe"}):  # the same picture, byte for byte
        figure.savefig(scratch, metadata={"Date": None})
    scratch.replace(path)


def _bars(axes: Any, chart: Chart) -> None:
    width = 0.84 / max(len(chart.series), 1)
    for number, series in enumerate(chart.series):
        shift = (number - (len(chart.series) - 1) / 2) * width
        pairs = [(at + shift, v) for at, v in enumerate(series.values) if v is not None]
        colour = _COLOURS[number % len(_COLOURS)]
        places, heights = zip(*pairs, strict=True) if pairs else ((), ())
        axes.bar(places, heights, width=0.94 * width, color=colour, label=series.name)
    axes.axhline(0, color="black", linewidth=0.6)


def _lines(axes: Any, chart: Chart) -> None:
    for number, series in enumerate(chart.series):
        pairs = [(at, v) for at, v in enumerate(series.values) if v is not None]
        places, heights = zip(*pairs, strict=True) if pairs else ((), ())
        axes.plot(
            places,
            heights,
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            label=series.name,
        )
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
