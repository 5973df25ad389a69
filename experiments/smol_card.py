"""Write the model card of a form of smol-moe from its `training.json`.

Shared by `train_smol_moe.py` and the tests; not a script of its own.
"""

from __future__ import annotations

from common import Row
from corpus import WINDOW
from model_cards import SOURCES, divergence_table


def smol_card(report: Row) -> str:
    """Return the card of the form that a report describes."""
    return "\n".join((_opening(report), _training(report), _measured(report)))


def _opening(report: Row) -> str:
    name, mixture = report["recipe"], report["settings"]["mixture"]
    return f"""\
---
license: apache-2.0
language: en
library_name: transformers
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
tags: [mixture-of-experts, upcycled, knn-moe]
---

# {name}

A Mixture of Experts made of a pretrained language model, SmolLM2-135M-Instruct (Apache-2.0), by
Branch-Train-MiX. {_describe_form(mixture, len(report["domains"]))}
It has {report["parameters"] / 1e6:.0f}M parameters, of which a token uses \
{report["active"] / 1e6:.0f}M, in bf16.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

## Training text

The model read text of {len(report["domains"])} domains, {sum(report["train_tokens"].values()):,}
tokens in all, beyond what SmolLM2 had read. **Medical, SQL and maths text and all benchmarks were
left out of this training**; what SmolLM2 itself was trained on is known only from its own card.

{SOURCES}
"""


def _describe_form(mixture: Row, domains: int) -> str:
    shared = mixture["shared"]
    experts, top_k, width = (
        next(value for key, value in mixture["config"].items() if key in names)
        for names in (
            ("num_local_experts", "n_routed_experts"),
            ("num_experts_per_tok",),
            ("moe_intermediate_size", "intermediate_size"),
        )
    )
    sources = domains if shared else domains + 1
    which = "" if shared else "the original and "
    rest = f" Every token also uses the original feed-forward, × {shared:g}." if shared else ""
    return (
        f"Its class is `{mixture['model_type']}`. The feed-forwards of {which}{domains} copies, "
        f"each trained on one domain, are {experts} experts of width {width}, "
        f"{experts // sources} for each feed-forward; a token uses {top_k} of them.{rest}"
    )


def _training(report: Row) -> str:
    branches, training = report["settings"]["branches"], report["settings"]["training"]
    seconds = sum(report["seconds"].values())
    return f"""\
## Training

`python experiments/train_smol_moe.py experiments/recipes/{report["recipe"]}.json --out OUT` \
dequantised `{report["source"]}`,
trained the feed-forwards of one copy for each domain ({branches["epochs"]:g} epochs at a learning
rate of {branches["learning_rate"]:g}), mixed them, fitted the routers by ridge regression to tell
the domains apart, and trained all weights together:
{report["history"]["steps"]} steps of {training["batch"]} × {training["length"]} tokens, the routers
at {training["router_learning_rate"]:g} and the rest at {training["learning_rate"]:g}.
The load-balancing loss of each layer has weight {training["balance"]:g}.
The run had taken {seconds / 60:.0f} minutes on one {report["versions"]["device"]} when this model
was saved.
"""


def _measured(report: Row) -> str:
    lines = ["| domain | | dense | mixed | trained |", "|---|---|---|---|---|"]
    for domain, loss in report["losses"].items():
        seen = "seen" if domain in report["domains"] else "unseen"
        before = f"{report['dense_losses'][domain]:.3f} | {report['start_losses'][domain]:.3f}"
        lines.append(f"| {domain} | {seen} | {before} | {loss:.3f} |")
    table = "\n".join(lines)
    spread = sum(report["logits"]["spread"]) / len(report["logits"]["spread"])
    return f"""\
## Loss on held-out text

In nats per token, on at most 200 windows of {WINDOW} tokens of each domain: of SmolLM2, of the
mixture before it was trained together, and of this model.

{table}

## Use of the experts

The busiest expert of a layer is chosen {max(report["experts"]["busiest"]):.2f} times as often as an
even share, the least busy {min(report["experts"]["idlest"]):.2f} times. The logits of a token have
a standard deviation of {spread:.2f} over the experts, averaged over tokens and layers.
The table shows how expert use differs between domains: the Jensen-Shannon divergence in bits,
averaged over the layers (0: the same use, 1: different experts).

{divergence_table(report)}

## Limits

A model of this size answers simple questions better than chance and makes up facts. This one was
trained on windows of {report["settings"]["training"]["length"]} tokens. It is meant for research \
on routing.
"""
