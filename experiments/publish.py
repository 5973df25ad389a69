"""Do the README, the results and the model cards say what was measured? Write them so that they do.

    python experiments/publish.py

Reads docs/measurements and the embedded models' `training.json`. Writes a card beside each
embedded model, docs/growth.svg, and tables between markers such as
`<!-- gains: experiments/publish.py -->` and `<!-- /gains -->`, in README.md and docs/*.md:

    gains         a pretrained model, questions and text (README.md must have it)
    costs         what recalling and building cost (README.md must have it)
    measurements  every method, task and model (docs/results.md must have it)
    choices-accuracy, pretrained-accuracy, pretrained-text, thirty-texts,
    forms-accuracy, forms-text, growth, transfer, together
                  runs of `reproduce pretrained` (docs/results.md must have them)
    builds, pruning, pruning-calibrated, labels

Running it again changes nothing; a test checks that the committed files are what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import measured_tables
from common import Arguments, make_parser, save_plot
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model
from measured_tables import LARGE, MODELS, read_measurement
from model_cards import model_card

ROOT: Final = Path(__file__).resolve().parents[1]
STUDIES: Final = (  # of pretrained models
    "pretrained-accuracy", "choices-accuracy", "pretrained-text", "thirty-texts",
    "forms-accuracy", "forms-text", "growth", "transfer", "together",
)  # fmt: skip
TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "gains": measured_tables.gains_table,
    "costs": measured_tables.costs_table,
    "measurements": measured_tables.measurements_table,
    **{name: partial(measured_tables.pretrained_table, name) for name in STUDIES},
    "builds": measured_tables.builds_table,
    "pruning": measured_tables.pruning_table,
    "pruning-calibrated": measured_tables.pruning_calibrated_table,
    "labels": measured_tables.labels_table,
}
REQUIRED: Final = {
    "README.md": ("gains", "costs"),
    "results.md": ("measurements", *STUDIES),
}


def main(arguments: Arguments = None) -> None:
    """Write everything that is published."""
    make_parser(__doc__).parse_args(arguments)
    for path, text in published_texts():
        path.write_text(text, encoding="utf8")
    plot_growth(ROOT / "docs" / "growth.svg")


def published_texts() -> Iterator[tuple[Path, str]]:
    """Yield every text file that is published, and its content."""
    for name in EMBEDDED_MODELS:
        card = model_card(name, read_measurement(f"{name}.json"))
        yield Path(embedded_model(name)) / "README.md", card
    for path in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"):
        text = path.read_text(encoding="utf8")
        yield path, fill_markers(text, path.name)


def fill_markers(text: str, name: str) -> str:
    """Return the text of a document with every table between its markers.

    Raises:
        SystemExit: A marker that the document must have is missing, or has no partner.
    """
    for table, make in TABLES.items():
        begin, end = f"<!-- {table}: experiments/publish.py -->", f"<!-- /{table} -->"
        if begin not in text and table not in REQUIRED.get(name, ()):
            continue
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(
                f"{name} must have the markers {begin} and {end} once each: add them on lines of "
                f"their own, and the table of {table} is written between them."
            )
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def plot_growth(path: Path) -> None:
    """Plot the gain on medical text against the size of the reference set, a line per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    growth = {model: read_measurement(f"{model}.json")["growth"] for model in MODELS}
    for model, marker in zip(MODELS, "osD^", strict=True):
        rows = [row for row in growth[model] if row["way"] != "paper"]
        sizes = [row["sequences"] for row in rows]
        gain, low, high = (
            [-row["nll_change"][part] for row in rows] for part in ("difference", "high", "low")
        )
        (line,) = axes.plot(sizes, gain, marker=marker, markersize=5, label=model)
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    paper = [row for row in growth[LARGE] if row["way"] == "paper"]
    axes.plot(
        [row["sequences"] for row in paper],
        [-row["nll_change"]["difference"] for row in paper],
        color="grey",
        linestyle="--",
        label=f"{LARGE}, preset paper",
    )
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xlabel("reference sequences of 256 tokens (medical text)")
    axes.set_ylabel("gain, nats per token")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    save_plot(figure, path)


if __name__ == "__main__":
    main()
