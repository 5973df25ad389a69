"""The embedded models and their tokenizer, for tests that need trained ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from knn_moe.support.embedded_models import embedded_model


def trained(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load an embedded model."""
    return AutoModelForCausalLM.from_pretrained(embedded_model(name), dtype=dtype).eval()


def words() -> Any:
    """Load the tokenizer, which is the same for all embedded models."""
    return AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe"))
