"""The embedded models and their tokenizer, for tests that need trained ones.

A test file imports the fixtures it uses, in place of conftest's of the same names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from knn_moe.support.embedded_models import embedded_model


def trained(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(embedded_model(name), dtype=dtype).eval()


def words() -> Any:
    """All three have the same tokenizer."""
    return AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return words()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return trained("tiny-olmoe")
