"""The model card of a memory: what a stranger on the hub needs to know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def model_card(config: Mapping[str, Any]) -> str:
    """Return Markdown with the hub's front matter, from what memory_config.json says."""
    base, build, routing = config["base_model"], config["build"], config["routing"]
    name = base["name"]
    index = f", {routing['index']['kind']} index" if routing["index"] else ""
    known_to_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    later = _calibration_row(config) + _pruning_row(config.get("pruned"))
    later += _control_row(config.get("random_seed"))
    origin = f"base_model: {name}\n" if known_to_hub else ""
    return f"""---
library_name: knn-moe
{origin}tags: [knn-moe, mixture-of-experts, retrieval]
---

# Routing memory for {name}

{_contents(config)} No
weight of the model changes; take the memory off and the model is what it was.

```python
from knn_moe import attach, load_model

model, tokenizer = load_model("{name}")
inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)
with attach(model, "REPO_OR_FOLDER"):
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
```

| | |
|---|---|
| built with | preset `{build["preset"]}`, S = {build["steps"]}, η = {build["learning_rate"]}, \
{build["gradient"]} gradient, {build["tokens"]} tokens |
| meant to be used with | K = {routing["k"]}, {routing["similarity"]} similarity{index}\
{_head_note(routing)} |
{later}| base model revision | {base["revision"] or "unknown"} |
| router fingerprint | `{base["fingerprint"][:16]}` |
| size | {config["bytes"] / 1e6:,.1f} MB |
| libraries | {", ".join(f"{key} {value}" for key, value in config["libraries"].items())} |

It holds the tokens of its reference set: share it as you would share that text.
"""


def _contents(config: Mapping[str, Any]) -> str:
    base, layers = config["base_model"], config["layers"]
    where = (
        f"for the\n{len(layers)} mixture-of-experts layers of `{base['name']}` "
        f"({base['architecture']})."
    )
    source = f"from {config['examples']:,} reference examples, {where}"
    if "prototypes" in layers[0]:
        return (
            f"{layers[0]['prototypes']:,} prototypes per layer, learned {source} A prototype is\n"
            f"a place among the router's inputs, and an update that makes the right next tokens "
            f"likelier there."
        )
    return (
        f"{config['keys']:,} cases per layer, {source} Each case\nis a router input and the "
        f"routing logits that would have made the true next token likelier."
    )


def _head_note(routing: Mapping[str, Any]) -> str:
    head = routing.get("head")
    if not head:
        return ""
    return (
        f"; a head mixes next tokens into the probabilities, weight {head['weight']:g}, "
        f"{describe_head(head)}"
    )


def describe_head(head: Mapping[str, Any]) -> str:
    """Say which keys a head looks up, and whether the memory also routes."""
    keys = "the last hidden state" if head.get("keys") == "hidden" else "the last router's input"
    return f"by {keys}{', without routing' if head.get('alone') else ''}"


def _calibration_row(config: Mapping[str, Any]) -> str:
    found = config.get("calibration")
    if not found:
        return ""
    way = "distilled" if "prototypes" in config["layers"][0] else "calibrated"
    change = found["change"]
    gain = (
        f"{change['difference']:+.3f} nats per token "
        f"({change['low']:+.3f} to {change['high']:+.3f}) "
        f"on {found['examples']} held-out reference examples"
    )
    off = "" if found["helps"] else ": no better than the model alone, so the memory does not route"
    return f"| {way} | {gain}{off} |\n"


def _pruning_row(left: Mapping[str, Any] | None) -> str:
    if not left:
        return ""
    return f"| pruned | {left['kept']:,} of {left['cases']:,} cases kept, by {left['score']} |\n"


def _control_row(seed: int | None) -> str:
    return "" if seed is None else f"| control | recalls cases at random, seed {seed} |\n"
