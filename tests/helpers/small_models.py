"""Small models with random weights, of the families of the embedded models."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.tiny import words
from knn_moe.support.embedded_models import embedded_model

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
}


def load_small(name: str) -> tuple[Any, Any]:
    """Return a small model with random weights, of the family of an embedded model."""
    torch.manual_seed(0)
    known = AutoConfig.from_pretrained(embedded_model(name))
    config = AutoConfig.from_pretrained(
        embedded_model(name), **{key: x for key, x in SIZES.items() if hasattr(known, key)}
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), words()
