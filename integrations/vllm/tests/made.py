"""Memories for the embedded models: full ones, and distilled ones of made-up prototypes.

They need not be good memories; they must change what the model says, each in its own way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from knn_moe import BuildConfig, RoutingConfig, RoutingMemory, build_memory, compress
from knn_moe.memory.distilled import DistilledLayer
from transformers import AutoModelForCausalLM, AutoTokenizer

_LONG = [" ".join(text.split()) for text in topics.values() if len(text) > 2000]
TEXTS = [text[:400] for text in _LONG]
# Which no memory holds, of many lengths.
PROMPTS = [text[400 : 500 + 60 * place] for place, text in enumerate(_LONG[:24])]
BUILD = BuildConfig(steps=5, learning_rate=2.0, gradient="dense")
_PROTOTYPES = 48


def load(folder: Path) -> tuple[Any, Any]:
    """Load a model and its tokenizer with transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def make_memories(model: Any, tokenizer: Any, folder: Path) -> dict[str, Path]:
    """Write the distilled memories A and B, the full ones C and D, and `fast`, which is C
    compressed. Return their folders."""
    made: dict[str, RoutingMemory] = {}
    for name, texts, seed in (("A", TEXTS[:6], 1), ("B", TEXTS[6:12], 2)):
        full = build_memory(model, tokenizer, texts, BUILD)
        made[name] = _distil(full, seed)
        routing = RoutingConfig(k=4, gamma_scale=0.3, spare_first_token=name == "A")
        made["CD"["AB".index(name)]] = replace(
            full, manifest=replace(full.manifest, routing=routing)
        )
    for name, memory in made.items():
        memory.save_pretrained(folder / name)
    compress(folder / "C", "fast", folder / "fast")
    return {name: folder / name for name in (*made, "fast")}


def _distil(full: RoutingMemory, seed: int) -> RoutingMemory:
    """Return a distilled memory whose prototypes are some of the keys, with random updates."""
    random = torch.Generator().manual_seed(seed)
    layers = {}
    for index, layer in full.full_layers().items():
        cases = torch.randperm(len(full), generator=random)[:_PROTOTYPES]
        experts = layer.values.shape[1]
        spread = float(layer.values.float().std())
        linear = torch.randn(experts, layer.keys.shape[1], generator=random)
        layers[index] = DistilledLayer(
            keys=layer.keys[cases].clone(),
            updates=spread * torch.randn(len(cases), experts, generator=random),
            linear=(0.01 * spread * linear).to(layer.keys.dtype),
            cases=cases,
            gamma=0.3 * layer.gamma,
            log_threshold=-1.0,
        )
    routing = RoutingConfig(spare_first_token=True)
    return replace(full, layers=layers, manifest=replace(full.manifest, routing=routing))
