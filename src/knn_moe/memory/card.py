"""The model card of a memory: what a stranger on the hub needs to know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def model_card(config: Mapping[str, Any]) -> str:
    """Markdown with the hub's front matter, from what memory_config.json says."""
    base, build, routing = config["base_model"], config["build"], config["routing"]
    name = base["name"]
    index = f", {routing['index']['kind']} index" if routing["index"] else ""
    known_to_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    since = _domains(config) + _calibrated(config.get("calibration"))
    since += _pruned(config.get("pruned"))
    origin = f"base_model: {name}\n" if known_to_hub else ""
    return f"""---
library_name: knn-moe
{origin}tags: [knn-moe, mixture-of-experts, retrieval]
---

# Routing memory for {name}

{config["keys"]:,} cases per layer, from {config["examples"]:,} reference examples, for the
{len(config["layers"])} mixture-of-experts layers of `{name}` ({base["architecture"]}). Each case
is a router input and the routing logits that would have made the true next token likelier. No
weight of the model changes; take the memory off and the model is what it was.

```python
from knn_moe import RoutingMemory, attach
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}")
memory = RoutingMemory.from_pretrained("REPO_OR_FOLDER")
with attach(model, memory):
    model.generate(...)
```

| | |
|---|---|
| built with | preset `{build["preset"]}`, S = {build["steps"]}, η = {build["learning_rate"]}, \
{build["gradient"]} gradient, {build["tokens"]} tokens |
| meant to be used with | K = {routing["k"]}, {routing["similarity"]} similarity{index}\
{_head(routing)} |
{since}| base model revision | {base["revision"] or "unknown"} |
| router fingerprint | `{base["fingerprint"][:16]}` |
| size | {config["bytes"] / 1e6:,.1f} MB |
| libraries | {", ".join(f"{key} {value}" for key, value in config["libraries"].items())} |

It holds the tokens of its reference set: share it as you would share that text.
"""


def _head(routing: Mapping[str, Any]) -> str:
    head = routing.get("head")
    return (
        f"; a head mixes what followed into the logits, weight {head['weight']:g}" if head else ""
    )


def domains_in_words(cases: Sequence[int], gammas: Sequence[Sequence[float]]) -> str:
    """How many cases each domain has, and its γ from layer to layer, of which `gammas` are."""
    told = []
    for number, count in enumerate(cases):
        widths = [layer[number] for layer in gammas]
        told.append(f"{count:,} cases (γ {min(widths):.3g} to {max(widths):.3g})")
    return f"{len(cases)}: {', '.join(told)}"


def _domains(config: Mapping[str, Any]) -> str:
    """A row, if memories of several were merged."""
    if "domains" not in config:
        return ""
    gammas = [layer["gammas"] for layer in config["layers"]]
    return f"| domains | {domains_in_words(config['domains'], gammas)} |\n"


def _calibrated(found: Mapping[str, Any] | None) -> str:
    """What it was found to be worth, as a row, if it was asked."""
    if not found:
        return ""
    change = found["change"]
    worth = (
        f"{change['difference']:+.3f} nats a token ({change['low']:+.3f} to {change['high']:+.3f}) "
        f"on {found['examples']} reference examples that had no part in it"
    )
    silent = "" if found["helps"] else ": no better than the model alone, so it keeps silent"
    return f"| calibrated | {worth}{silent} |\n"


def _pruned(left: Mapping[str, Any] | None) -> str:
    if not left:
        return ""
    return f"| pruned | {left['kept']:,} of {left['cases']:,} cases kept, by {left['score']} |\n"
