"""Write the text of the embedded models' cards from what was measured.

Shared by `publish.py` and the tests; not a script of its own. It reads each model's
`training.json` (from `train.py`) and its measurement (from `measure_presets.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from common import Row
from corpus import WINDOW
from knn_moe.support.embedded_models import embedded_model

FAMILIES: Final = {
    "tiny-olmoe": "OLMoE: a softmax over 16 experts, of which the top 4 keep their weights",
    "tiny-qwen3": "Qwen3-MoE: a softmax over 16 experts, the weights of the top 4 renormalised",
    "tiny-gpt-oss": "GPT-OSS: the top 4 of 16 experts, then a softmax; the router has a bias",
}
WAYS: Final = {
    "zero-shot": "zero-shot",
    "paper": "kNN-MoE, preset `paper`",
    "calibrated": "kNN-MoE, calibrated",
    "shuffled": "control: calibrated, values shuffled",
    # Earlier measurements have these instead.
    "strong": "kNN-MoE, preset `strong`, which was removed",
    "control": "control: strong, values shuffled",
}

SOURCES: Final = """\
| domain | source | licence |
|---|---|---|
| fiction | 16 novels, Standard Ebooks | US public domain; CC0 1.0 |
| textbook | six OpenStax textbooks (economics, US history, astronomy, sociology, psychology, \
American government), Rice University | CC BY 4.0 at the commits used |
| legal | District of Columbia code | statute text, not under copyright |
| python | sympy, TheAlgorithms/Python, click, httpx | BSD-3, MIT, BSD-3, BSD-3 |
| tinystories | 4 MB of TinyStories, lower-cased (written by GPT-3.5 and GPT-4) \
| CDLA-Sharing-1.0 upstream; the copy used is under MIT |"""


def read_training(name: str) -> Row:
    """Read what `train.py` wrote beside an embedded model."""
    path = Path(embedded_model(name)) / "training.json"
    found: Row = json.loads(path.read_text(encoding="utf8"))
    return found


def model_card(name: str, measured: Row) -> str:
    """Return the card of an embedded model, given its measurement."""
    training = read_training(name)
    parts = (_opening(name, training), _training(training), _gains(name, measured))
    return "\n".join(parts)


def _opening(name: str, training: Row) -> str:
    return f"""\
---
license: apache-2.0
language: en
library_name: transformers
tags: [mixture-of-experts, tiny, knn-moe]
---

# {name}

A small Mixture-of-Experts language model, trained from scratch. It comes with the package, so that
kNN-MoE can be shown and tested without a download. {FAMILIES[name]}.
It has {training["parameters"] / 1e6:.1f}M parameters, of which a token uses \
{training["active"] / 1e6:.1f}M, in bf16.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from knn_moe.support.embedded_models import embedded_model

model = AutoModelForCausalLM.from_pretrained(embedded_model("{name}"))
tokenizer = AutoTokenizer.from_pretrained(embedded_model("{name}"))
```

## Training text

The model read {training["train_tokens"]:,} tokens of five domains, split by document, with 5 %
held out. Its byte-level BPE tokenizer has 4,096 tokens, was trained on the same text, and is shared
by all three models. **Medical, SQL and maths text and all benchmarks are unseen.**

{SOURCES}
"""


def _training(training: Row) -> str:
    history = training["history"]
    return f"""\
## Training

`python experiments/train.py experiments/recipes/tiny-*.json --out OUT` trained all three models at
once on one {training["versions"]["device"]} in {history["seconds"] / 60:.0f} minutes: \
{len(history["train"])} epochs, {history["tokens"] / 1e6:.0f}M tokens.
{_describe_recipe(training["settings"])}
Loss on held-out text after each epoch: {", ".join(f"{loss:.3f}" for loss in history["valid"])}.

## Loss on held-out text

In nats per token, on 200 windows of {WINDOW} tokens of each domain.

{_losses_table(training)}

## Use of the experts

The busiest expert of a layer is chosen {max(training["experts"]["busiest"]):.2f} times as often as
an even share, the least busy {min(training["experts"]["idlest"]):.2f} times. The table shows how
expert use differs between domains: the Jensen-Shannon divergence in bits, averaged over the layers
(0: the same use, 1: different experts).

{divergence_table(training)}
"""


def _gains(name: str, measured: Row) -> str:
    return f"""\
## What a memory gains

`python experiments/measure_presets.py {name} --out OUT` with {measured["sequences"]} × {WINDOW}
reference tokens and 200 × {WINDOW} test tokens, on one {measured["device"]}. The first row is in
nats per token; below it are changes in nats per token ± half of the 95 % interval, and in brackets
the change in next-token accuracy in points. The control gives each case the value of another case.

{_gains_table(measured)}

## Limits

The model writes grammatical nonsense and knows no facts. It was trained on windows of 512 tokens.
It is meant for tests and demonstrations of routing: numbers measured on it show that a method
works, not how much it gains on a model of useful size.
"""


def _describe_recipe(settings: Row) -> str:
    recipe = SimpleNamespace(**settings)
    shape = recipe.config
    return f"""\
A batch has {recipe.batch} windows of {recipe.length} tokens. AdamW (β 0.9 and 0.95, weight decay
{recipe.weight_decay}) updates fp32 copies of the weights; gradients are clipped at {recipe.clip:g}.
The learning rate rises to {recipe.learning_rate:g} over the first {recipe.warmup:.0%} of the steps
and falls to a twentieth of that along a cosine. The load-balancing loss of each layer has weight
{recipe.balance:g}; the seed is {recipe.seed}. The model has {shape["num_hidden_layers"]} layers of
width {shape["hidden_size"]}, {shape["num_attention_heads"]} attention heads and experts of width
{shape["intermediate_size"]}; input and output embeddings are shared."""


def _losses_table(training: Row) -> str:
    lines = ["| domain | | loss |", "|---|---|---|"]
    for domain, loss in training["losses"].items():
        seen = "seen" if domain in training["domains"] else "unseen"
        lines.append(f"| {domain} | {seen} | {loss:.3f} |")
    return "\n".join(lines)


def divergence_table(training: Row) -> str:
    """Return the table of how expert use differs between domains."""
    found = training["experts"]["divergence"]
    lines = ["| | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for one, others in found.items():
        lines.append(f"| {one} | " + " | ".join(f"{value:.2f}" for value in others.values()) + " |")
    return "\n".join(lines)


def _gains_table(measured: Row) -> str:
    lines = ["| | medical | sql |", "|---|---|---|"]
    for way, title in WAYS.items():
        cells = [
            gain_cell(row)
            for domain in ("medical", "sql")
            for row in measured["table"]
            if (row["domain"], row["way"]) == (domain, way)
        ]
        if cells:
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gain_cell(row: Row) -> str:
    """Format the loss of a row, or its change with margin and points of accuracy."""
    if "nll_change" not in row:
        return f"{row['nll']:.3f}"
    change, points = row["nll_change"], row["accuracy_change"]["difference"] * 100
    margin = (change["high"] - change["low"]) / 2
    return f"{change['difference']:+.3f} ± {margin:.3f} ({points:+.1f})"
