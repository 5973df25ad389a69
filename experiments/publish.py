"""Turn what was measured into what is read: model cards, the README's table, the growth plot.

    python models/publish.py

Reads `docs/measurements/*.json` (from `measure.py`), `docs/measurements/calibrated` (from
`calibrated.py`) and each model's `training.json`; writes a card beside each embedded model, tables
between two marks in the README and in docs/results.md, and `docs/growth.svg`.
Running it again changes nothing: a test holds the committed files to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS = ROOT / "docs" / "measurements"
LARGE = "olmoe-80m"
WAYS = {
    "zero-shot": "zero-shot",
    "paper": "kNN-MoE, paper",
    "strong": "kNN-MoE, strong",
    "control": "strong, values shuffled",
}
TEXTS = {"text_medical": "medical", "text_sql": "sql"}
QUESTIONS = "medmcqa"
METHODS = {
    "zero-shot": "zero-shot",
    "knn-paper": "kNN-MoE, paper",
    "knn": "kNN-MoE, strong",
    "knn-calibrated": "**kNN-MoE, calibrated**",
    "sft-router": "SFT of the routers",
    "sft": "SFT (LoRA on everything)",
    "knn-lm": "kNN-LM",
    "knn-calibrated+head": "calibrated, with its head",
    "knn-calibrated+knn-lm": "calibrated + kNN-LM",
}
MARKS = "<!-- measurements: models/publish.py -->", "<!-- /measurements -->"

FAMILIES = {
    "tiny-olmoe": "OLMoE: softmax, then the top 4 of 16 experts, weights as they are",
    "tiny-qwen3": "Qwen3-MoE: softmax, the top 4 of 16 experts, weights renormalised",
    "tiny-gpt-oss": "GPT-OSS: the top 4 of 16 experts, then softmax; a bias on the router",
}

SOURCES = """\
| domain | source | licence |
|---|---|---|
| fiction | 16 novels, Standard Ebooks | US public domain; CC0 1.0 |
| textbook | six OpenStax textbooks (economics, US history, astronomy, sociology, psychology, \
American government), Rice University | CC BY 4.0 at the commits used |
| legal | District of Columbia code | statute text, not under copyright |
| python | sympy, TheAlgorithms/Python, click, httpx | BSD-3, MIT, BSD-3, BSD-3 |
| tinystories | 4 MB of TinyStories, lower-cased (written by GPT-3.5/4, as its authors say) | \
CDLA-Sharing-1.0 upstream; the copy read is under MIT |"""


def main() -> None:
    for name in EMBEDDED_MODELS:
        write(Path(embedded_model(name)) / "README.md", model_card(name))
    readme = ROOT / "README.md"
    write(readme, replace_between(readme.read_text(encoding="utf8"), readme_table()))
    results = ROOT / "docs" / "results.md"
    write(results, replace_between(results.read_text(encoding="utf8"), results_table()))
    plot_growth(ROOT / "docs" / "growth.svg")


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf8")


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MEASUREMENTS / f"{name}.json").read_text(encoding="utf8"))
    return found


def training(name: str) -> dict[str, Any]:
    path = Path(embedded_model(name)) / "training.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    return found


def replace_between(text: str, table: str) -> str:
    """`text` with what stands between the marks replaced."""
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}"


def readme_table() -> str:
    """Change in nats per token by every method, all models and texts."""
    models = [*EMBEDDED_MODELS, LARGE]
    lines = [
        "| text | " + " | ".join(["way", *models]) + " |",
        "|---|---|" + "---|" * len(models),
    ]
    for task, words in TEXTS.items():
        for method, title in METHODS.items():
            cells = [method_cell(model, task, method) for model in models]
            lines.append(f"| {words} | {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def results_table() -> str:
    """The same for every task, with the seconds each method took to prepare."""
    models = [*EMBEDDED_MODELS, LARGE]
    lines = [
        "| task | " + " | ".join(["way", *models]) + " |",
        "|---|---|" + "---|" * len(models),
    ]
    for task in (*TEXTS, QUESTIONS):
        for method, title in METHODS.items():
            cells = [method_cell(model, task, method, seconds=True) for model in models]
            lines.append(f"| {task} | {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def method_cell(model: str, task: str, method: str, *, seconds: bool = False) -> str:
    """The loss of zero-shot; of the others the change and half its interval, if measured."""
    path = MEASUREMENTS / "calibrated" / f"{model}-{task}.json"
    rows = json.loads(path.read_text(encoding="utf8")) if path.is_file() else []
    row = next((row for row in rows if row["method"] == method), None)
    if row is None:
        return "-"
    loss, change = ("nll", "nll_change") if task in TEXTS else ("answer_loss", "answer_change")
    if row[change] is None:
        return f"{row[loss]:.3f}"
    found = row[change]
    told = f"{found['difference']:+.3f} ± {(found['high'] - found['low']) / 2:.3f}"
    return f"{told}, {row['preparation_seconds']:.0f} s" if seconds else told


def row_of(found: dict[str, Any], domain: str, way: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = found["table"]
    return next(row for row in rows if (row["domain"], row["way"]) == (domain, way))


def change_cell(row: dict[str, Any]) -> str:
    if "nll_change" not in row:
        return f"{row['nll']:.3f}"
    change, points = row["nll_change"], row["accuracy_change"]["difference"] * 100
    margin = (change["high"] - change["low"]) / 2
    return f"{change['difference']:+.3f} ± {margin:.3f} ({points:+.1f})"


def model_card(name: str) -> str:
    facts, found = training(name), measured(name)
    return "\n".join([card_opening(name, facts), card_training(facts), card_worth(name, found)])


def card_opening(name: str, facts: dict[str, Any]) -> str:
    return f"""\
---
license: apache-2.0
language: en
library_name: transformers
tags: [mixture-of-experts, tiny, knn-moe]
---

# {name}

A small Mixture-of-Experts language model, trained from scratch to show and test kNN-MoE where no
large model can be had. {FAMILIES[name]}.
{facts["parameters"] / 1e6:.1f}M parameters, {facts["active"] / 1e6:.1f}M of them active for a
token; bf16.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from knn_moe.support.embedded_models import embedded_model

model = AutoModelForCausalLM.from_pretrained(embedded_model("{name}"))
tokenizer = AutoTokenizer.from_pretrained(embedded_model("{name}"))
```

## What it read

{facts["train_tokens"]:,} tokens of five domains, split by document, 5 % held out; a byte-level
BPE tokenizer of 4,096 tokens, trained on the same text and shared by all three models. **Medical,
SQL and maths text and every benchmark are unseen.**

{SOURCES}
"""


def card_training(facts: dict[str, Any]) -> str:
    history = facts["history"]
    return f"""\
## How it was trained

`python models/train.py models/recipes/tiny-*.json --out OUT` on one {facts["versions"]["device"]},
all three at once, in {history["seconds"] / 60:.0f} minutes: {len(history["train"])} epochs, \
{history["tokens"] / 1e6:.0f}M tokens.
{recipe_words(facts)}
Loss on held-out text by epoch: {", ".join(f"{loss:.3f}" for loss in history["valid"])}.

## Loss on held-out text

Nats per token, 200 windows of 256 tokens each.

{losses_table(facts)}

## Its experts

The busiest expert of a layer has {max(facts["experts"]["busiest"]):.2f} times an even share, the
idlest {min(facts["experts"]["idlest"]):.2f}. How expert use differs between domains
(Jensen-Shannon divergence in bits, averaged over the layers; 0 is alike, 1 is disjoint):

{divergence_table(facts)}
"""


def card_worth(name: str, found: dict[str, Any]) -> str:
    return f"""\
## What a memory is worth to it

{found["sequences"]} × 256 reference tokens, 200 × 256 test tokens; change in nats per token with
its 95 % interval, and in next-token accuracy (points), on one {found["device"]}:
`python models/measure.py {name} --out OUT`

{card_table(found)}

The shuffled memory is a control: each case with another case's value.

## Limits

It writes grammatical nonsense and knows no facts. It was trained on windows of 512 tokens. It is
made for tests and demonstrations of routing: figures measured on it say that a method works, not
what it is worth on a model of useful size.
"""


def recipe_words(facts: dict[str, Any]) -> str:
    recipe = SimpleNamespace(**facts["settings"])
    shape = recipe.config
    return f"""\
Batches of {recipe.batch} windows of {recipe.length} tokens; AdamW (β 0.9 and 0.95, weight
decay {recipe.weight_decay}) on fp32 copies of the weights, gradients clipped at {recipe.clip:g};
learning rate up to {recipe.learning_rate:g} over the first {recipe.warmup:.0%} of the steps, then
a cosine to a twentieth; {recipe.balance:g} times a load-balancing loss of each layer; seed
{recipe.seed}. Shape: {shape["num_hidden_layers"]} layers of width {shape["hidden_size"]},
{shape["num_attention_heads"]} heads, experts of width {shape["intermediate_size"]}, input and
output embeddings shared."""


def losses_table(facts: dict[str, Any]) -> str:
    lines = ["| domain | | loss |", "|---|---|---|"]
    for domain, loss in facts["losses"].items():
        seen = "seen" if domain in facts["domains"] else "unseen"
        lines.append(f"| {domain} | {seen} | {loss:.3f} |")
    return "\n".join(lines)


def divergence_table(facts: dict[str, Any]) -> str:
    found = facts["experts"]["divergence"]
    lines = ["| | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for one, others in found.items():
        lines.append(f"| {one} | " + " | ".join(f"{value:.2f}" for value in others.values()) + " |")
    return "\n".join(lines)


def card_table(found: dict[str, Any]) -> str:
    lines = ["| | medical | sql |", "|---|---|---|"]
    for way, words in WAYS.items():
        cells = [change_cell(row_of(found, domain, way)) for domain in ("medical", "sql")]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot_growth(path: Path) -> None:
    """The gain on medical text against the size of the reference set, one line a model."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "knn-moe"  # the same plot, byte for byte
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
    for name, marker in zip([*EMBEDDED_MODELS, LARGE], "osD^", strict=True):
        rows = [row for row in measured(name)["growth"] if row["way"] == "strong"]
        sizes = [row["sequences"] for row in rows]
        gain = [-row["nll_change"]["difference"] for row in rows]
        low = [-row["nll_change"]["high"] for row in rows]
        high = [-row["nll_change"]["low"] for row in rows]
        (line,) = axes.plot(sizes, gain, marker=marker, markersize=5, label=name)
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    papers = [row for row in measured(LARGE)["growth"] if row["way"] == "paper"]
    axes.plot(
        [row["sequences"] for row in papers],
        [-row["nll_change"]["difference"] for row in papers],
        color="grey",
        linestyle="--",
        label=f"{LARGE}, paper's preset",
    )
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xlabel("reference sequences of 256 tokens (medical text)")
    axes.set_ylabel("gain, nats per token")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
