"""Do the README, the results and the model cards say what was measured? Write them so that they do.

    python experiments/publish.py

Reads docs/measurements and the embedded models' `training.json`. Writes a card beside each
embedded model, docs/growth.svg, and tables between markers such as
`<!-- gains: experiments/publish.py -->` and `<!-- /gains -->`, in README.md and docs/*.md:

    gains         two models, two texts (README.md must have it)
    costs         what recalling and building cost (README.md must have it)
    measurements  every method, task and model (docs/results.md must have it)
    builds        building time of three published shapes

Running it again changes nothing; a test checks that the committed files are what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from common import Arguments, Row, make_parser, save_plot
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model
from model_cards import model_card

ROOT: Final = Path(__file__).resolve().parents[1]
MEASUREMENTS: Final = ROOT / "docs" / "measurements"
LARGE: Final = "olmoe-80m"
MODELS: Final = (*EMBEDDED_MODELS, LARGE)
TEXTS: Final = {"text_medical": "medical", "text_sql": "sql"}
TASKS: Final = (*TEXTS, "medmcqa")
METHODS: Final = {
    "zero-shot": "zero-shot",
    "knn-paper": "kNN-MoE, preset `paper`",
    "knn": "kNN-MoE, preset `strong`",
    "knn-calibrated": "**kNN-MoE, calibrated**",
    "knn-calibrated+head": "**kNN-MoE, calibrated, with head**",
    "sft-router": "SFT, routers only",
    "sft": "SFT, LoRA on all weights",
    "knn-lm": "kNN-LM",
    "knn-calibrated+knn-lm": "kNN-MoE, calibrated, and kNN-LM",
}
COST_SHAPE: Final = "olmoe-1b-7b"


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


def read_measurement(name: str) -> Any:
    """Read a file of docs/measurements."""
    return json.loads((MEASUREMENTS / name).read_text(encoding="utf8"))


def gains_table() -> str:
    """Return the README's gains: every way to adapt two models to two texts."""
    columns = [(model, task) for model in (EMBEDDED_MODELS[0], LARGE) for task in TEXTS]
    header = ["nats per token", *(f"{model}, {TEXTS[task]}" for model, task in columns)]
    rows = [
        [title, *(method_cell(model, task, method) for model, task in columns)]
        for method, title in METHODS.items()
        if method != "knn-calibrated+knn-lm"
    ]
    return markdown_table(header, rows)


def measurements_table() -> str:
    """Return the full table: every task, method and model, with the seconds of preparation."""
    rows = [
        [task, title, *(method_cell(model, task, method, seconds=True) for model in MODELS)]
        for task in TASKS
        for method, title in METHODS.items()
    ]
    return markdown_table(["task", "method", *MODELS], rows)


def method_cell(model: str, task: str, method: str, *, seconds: bool = False) -> str:
    """Format the zero-shot loss or, for other methods, the change and half its interval."""
    rows: list[Row] = read_measurement(f"calibrated/{model}-{task}.json")
    row = next((row for row in rows if row["method"] == method), None)
    if row is None:
        return "-"
    loss, change = ("nll", "nll_change") if task in TEXTS else ("answer_loss", "answer_change")
    if row[change] is None:
        return f"{row[loss]:.3f}"
    found = row[change]
    cell = f"{found['difference']:+.3f} ± {(found['high'] - found['low']) / 2:.3f}"
    return f"{cell}, {row['preparation_seconds']:.0f} s" if seconds else cell


def costs_table() -> str:
    """Return the README's costs: what recalling adds to time and GPU memory, and building."""
    rows: list[Row] = read_measurement(f"retrieval/{COST_SHAPE}.json")["rows"]
    cells = {(row["what"], row["index"]): row for row in rows}
    kinds = sorted({row["what"] for row in rows if "eager" not in row["what"]})
    lines = [
        [
            kind,
            f"{cells[kind, 'fast']['alone_milliseconds']:.3g} ms",
            *(percent(cells[kind, index]["times_alone"]) for index in ("fast", "exact")),
        ]
        for kind in kinds
    ]
    fast, exact = (cells[kinds[0], index] for index in ("fast", "exact"))
    added = [percent(row["memory_times_alone"]) for row in (fast, exact)]
    lines.append(["GPU memory", f"{fast['alone_gigabytes']:.1f} GB", *added])
    build = read_measurement(f"building/{COST_SHAPE}.json")
    seconds = f"{build['seconds']:.1f} s"
    lines.append([f"build from {build['tokens']:,} tokens", "-", seconds, seconds])
    name = f"{build['name']}, one {build['device']}"
    return markdown_table([name, "without memory", "index `fast`", "index `exact`"], lines)


def builds_table() -> str:
    """Return the time and memory it takes to build, for each published shape."""
    rows = []
    for path in sorted((MEASUREMENTS / "building").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf8"))
        rows.append(
            [
                f"{found['name']} (batches of {found['batch_tokens']:,} tokens)",
                f"{found['model_tokens_per_second']:,} tokens/s",
                f"{found['times_plain']} ×",
                f"{found['seconds']} s for {found['gigabytes_on_disk']} GB",
                f"{found['peak_gigabytes']} GB",
            ]
        )
    header = ["shape", "in the model", "against one sequence at a time, `eager`"]
    return markdown_table([*header, "end to end, memory on disk", "peak GPU memory"], rows)


def percent(times: float) -> str:
    """Format a factor as what it adds, in percent."""
    added = (times - 1) * 100
    return f"{added:+.1f} %" if abs(added) < 10 else f"{added:+.0f} %"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot_growth(path: Path) -> None:
    """Plot the gain on medical text against the size of the reference set, a line per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    growth = {model: read_measurement(f"{model}.json")["growth"] for model in MODELS}
    for model, marker in zip(MODELS, "osD^", strict=True):
        rows = [row for row in growth[model] if row["way"] == "strong"]
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


TABLES: Final = {
    "gains": gains_table,
    "costs": costs_table,
    "measurements": measurements_table,
    "builds": builds_table,
}
REQUIRED: Final = {"README.md": ("gains", "costs"), "results.md": ("measurements",)}

if __name__ == "__main__":
    main()
