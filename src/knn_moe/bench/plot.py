"""Plots of a retrieval benchmark. Imports matplotlib only when it draws.

A layer alone: time against keys, both on log scales. A running model: what each index adds to a
step, in percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from knn_moe.bench.search import SearchMeasure
from knn_moe.bench.steps import ALONE, StepMeasure
from knn_moe.errors import ConfigError, MissingDependencyError

_FORMATS: Final = (".svg", ".png")
_COLOURS: Final = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3")
_STYLES: Final = ("-", "--", ":", "-.")
_MARKERS: Final = ("o", "s", "^", "D")
_LINEAR: Final = 10.0  # percent up to which bars grow evenly; beyond that, by powers of ten
_GROUP: Final = 0.8  # of the way from one group of bars to the next


def check_plot(path: Path) -> None:
    """Check that a plot can be written, before anything is measured.

    Raises:
        ConfigError: The format is unknown, or the folder does not exist.
        MissingDependencyError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"A plot is written as {' or '.join(_FORMATS)}, got {path.name!r}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {str(path.parent)!r} for the plot. Create it first.")
    _new_figure(1.0, 1.0)


def plot_search(rows: Sequence[SearchMeasure], path: Path) -> None:
    """Plot µs against keys: a colour for each index, a line style for each batch size."""
    indexes = list(dict.fromkeys(row.index for row in rows))
    batches = list(dict.fromkeys(row.batch for row in rows))
    sizes = sorted({row.keys for row in rows})
    figure, axes = _new_figure(8.0, 4.2)
    for i, index in enumerate(indexes):
        for j, batch in enumerate(batches):
            part = [row for row in rows if (row.index, row.batch) == (index, batch)]
            part.sort(key=lambda row: row.keys)
            axes.plot(
                [row.keys for row in part],
                [row.microseconds for row in part],
                color=_COLOURS[i % len(_COLOURS)],
                linestyle=_STYLES[j % len(_STYLES)],
                marker=_MARKERS[j % len(_MARKERS)],
                markersize=5,
                label=f"{index}, batch {batch}",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("keys")
    axes.set_ylabel("µs a layer")
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    _save(figure, path)


def plot_steps(rows: Sequence[StepMeasure], path: Path) -> None:
    """Plot percent over the model alone: a group of bars for each step and for memory."""
    added = _percent_added(rows)
    indexes = list(dict.fromkeys(index for _, index in added))
    groups = list(dict.fromkeys(what for what, _ in added))
    figure, axes = _new_figure(max(6.0, 1.8 * len(groups)), 4.0)
    width = _GROUP / max(len(indexes), 1)
    for i, index in enumerate(indexes):
        shift = (i - (len(indexes) - 1) / 2) * width
        places = [at for at, what in enumerate(groups) if (what, index) in added]
        bars = axes.bar(
            [place + shift for place in places],
            [added[groups[place], index] for place in places],
            width=0.92 * width,
            color=_COLOURS[i % len(_COLOURS)],
            label=index,
        )
        axes.bar_label(bars, fmt="{:+,.1f}", fontsize=8, padding=2)
    axes.set_yscale("symlog", linthresh=_LINEAR)
    axes.yaxis.set_major_formatter("{x:,.0f} %")
    axes.margins(y=0.15)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(groups)), [what.replace(", ", "\n") for what in groups])
    axes.tick_params(axis="x", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_ylabel(f"over the model alone (log scale from {_LINEAR:.0f} %)")
    figure.legend(loc="outside upper left", frameon=False, ncols=4)
    _save(figure, path)


def _percent_added(rows: Sequence[StepMeasure]) -> dict[tuple[str, str], float]:
    """Return percent by step and index; memory, where it was measured, comes last."""
    others = [row for row in rows if row.memory != ALONE]
    steps = {(row.what, row.memory): 100 * (row.times_alone - 1) for row in others}
    memory = {
        ("GPU memory", row.memory): 100 * (row.memory_times_alone - 1)
        for row in others
        if row.memory_times_alone is not None
    }
    return steps | memory


def _new_figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "A plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "knn-moe"}):  # the same plot, byte for byte
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=160)
