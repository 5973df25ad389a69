"""Make the tables that `publish.py` writes, from docs/measurements.

Shared by `publish.py` and the tests; not a script of its own. Each function that ends in `_table`
returns one table in Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from common import Row
from knn_moe.methods import METHODS as METHOD_SPECS
from knn_moe.support.embedded_models import EMBEDDED_MODELS

MEASUREMENTS: Final = Path(__file__).resolve().parents[1] / "docs" / "measurements"
LARGE: Final = "olmoe-80m"
MODELS: Final = (*EMBEDDED_MODELS, LARGE)
TEXTS: Final = {"text_medical": "medical", "text_sql": "sql"}
TASKS: Final = (*TEXTS, "medmcqa")
METHODS: Final = {
    "zero-shot": "zero-shot",
    "knn-paper": "kNN-MoE, preset `paper`",
    "knn-strong": "kNN-MoE, preset `strong`",
    "knn-calibrated": "**kNN-MoE, calibrated**",
    "knn-calibrated+head": "**kNN-MoE, calibrated, with head**",
    "sft-router": "SFT, routers only",
    "sft": "SFT, LoRA on all weights",
    "knn-lm": "kNN-LM",
    "knn-calibrated+knn-lm": "kNN-MoE, calibrated, and kNN-LM",
}
PRETRAINED: Final = "smol-moe"
GAINS: Final = {  # what README shows, by table of the study of pretrained models
    "choices-accuracy": ("SciQ", "ARC-Easy", "CommonsenseQA", "OpenBookQA", "ARC-Challenge"),
    "pretrained-text": ("medical text", "sql text"),
}
STUDIED: Final = {  # the rows of README: the methods for questions and for text
    "zero-shot": ("zero-shot", "zero-shot"),
    "knn-calibrated": ("knn-calibrated", "knn-calibrated"),
    "knn-calibrated+head": (None, "knn-calibrated+head"),
    "sft-router": ("sft-router-choices", "sft-router"),
    "knn-lm": ("knn-lm", "knn-lm"),
}
COST_SHAPE: Final = "olmoe-1b-7b"

LABELS: Final = {
    "true": "the true continuations",
    "true, own logits": "the same, control `own-logits`",
    "greedy": "the model's most likely continuation",
    "greedy, surest half": "the same, the most confident half of 128",
    "sampled": "a sample at temperature 1",
    "the prompts as text": "no labels: the prompts as plain text",
}


def read_measurement(name: str) -> Any:
    """Read a file of docs/measurements."""
    return json.loads((MEASUREMENTS / name).read_text(encoding="utf8"))


def gains_table() -> str:
    """Return the README's gains: what each method makes of questions and text on one model."""
    rows: dict[str, list[str]] = {METHODS[name]: [] for name in STUDIED}
    for place, (table, titles) in enumerate(GAINS.items()):
        found = read_measurement(f"pretrained/{table}.json")
        columns = [found["columns"].index(title) for title in titles]
        cells = {
            row[1]["text"].lower(): [row[column]["text"] for column in columns]
            for row in found["rows"]
            if row[0]["text"] == PRETRAINED
        }
        for name, methods in STUDIED.items():
            method = methods[place]
            title = METHOD_SPECS[method].title.lower() if method else ""
            rows[METHODS[name]] += cells[title] if title else ["-"] * len(titles)
    header = [PRETRAINED, *(f"{title} %" for title in GAINS["choices-accuracy"])]
    header += [f"{title}, nats" for title in GAINS["pretrained-text"]]
    return markdown_table(header, [[title, *row] for title, row in rows.items()])


def pretrained_table(name: str) -> str:
    """Return a table of the study of pretrained models without the rows that have no number."""
    found = read_measurement(f"pretrained/{name}.json")
    rows = [[cell["text"] for cell in row] for row in found["rows"]]
    measured = [row for row in rows if any(text != "-" for text in row[2:])]
    return markdown_table(found["columns"], measured)


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
    cells = {(row["what"], row["memory"].split(",")[0]): row for row in rows}
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


def pruning_table() -> str:
    """Return what memories keep of their gain when they are pruned by loss or at random."""
    return _pruning_table("prune", {"loss": "by loss", "random": "at random"})


def pruning_calibrated_table() -> str:
    """Return the same for memories that are pruned by chance and then calibrated."""
    ways = {"loss": "by loss", "chance": "by chance", "calibrated": "by chance, calibrated"}
    return _pruning_table("prune-calibrated", ways)


def _pruning_table(folder: str, ways: dict[str, str]) -> str:
    order = {f"{model}.json": place for place, model in enumerate(MODELS)}
    paths = sorted((MEASUREMENTS / folder).glob("*.json"), key=lambda path: order[path.name])
    files = [json.loads(path.read_text(encoding="utf8")) for path in paths]
    header = [f"{found['model']}, {title}" for found in files for title in ways.values()]
    rows = []
    for keep in sorted({row["keep"] for row in files[0]["rows"]}, reverse=True):
        kept = "all" if keep == 1 else f"{keep:.0%}".replace("%", " %")
        cells = [pruning_cell(found["rows"], way, keep) for found in files for way in ways]
        rows.append([kept, *cells])
    return markdown_table(["kept", *header], rows)


def pruning_cell(rows: list[Row], way: str, keep: float) -> str:
    """Format the change and its share of the whole memory's; uncalibrated wholes are one row."""
    names = (way, "whole") if keep == 1 else (way,)
    row = next(row for name in names for row in rows if (row["way"], row["keep"]) == (name, keep))
    change = f"{row['nll_change']['difference']:+.3f}"
    share = f"{row['share_of_gain'] * 100:.0f} %"
    return change if row["way"] == "whole" else f"{change} ({share})"


def labels_table() -> str:
    """Return what memories of true and of the model's own labels gain."""
    columns = [("tiny-olmoe", "sql"), ("tiny-qwen3", "sql"), ("tiny-olmoe", "medical")]
    files = {model: read_measurement(f"labels/{model}.json") for model, _ in columns}
    changes = {
        (model, row["domain"], row["labels"]): row.get("nll_change")
        for model, found in files.items()
        for row in found["rows"]
    }
    interval = "{difference:+.3f} ({low:+.3f} to {high:+.3f})"
    rows = [
        [title, *(interval.format(**changes[model, domain, labels]) for model, domain in columns)]
        for labels, title in LABELS.items()
    ]
    return markdown_table(["memory of", *(f"{model}, {domain}" for model, domain in columns)], rows)
