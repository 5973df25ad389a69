"""experiments/upcycle.py: a mixture of equal copies computes what the dense model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from upcycle import Mixture, feed_forwards, mix

FORMS = {
    "shards": Mixture(
        "mixtral",
        {"num_local_experts": 12, "num_experts_per_tok": 8, "intermediate_size": 8},
    ),
    "whole": Mixture(
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "shared": Mixture(
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 8,
            "n_shared_experts": 4,
            "intermediate_size": 32,
            "first_k_dense_replace": 0,
            "num_mtp_layers": 0,
            "partial_rotary_factor": 1.0,
        },
        shared=0.5,
    ),
}


@pytest.fixture
def dense() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def changed(dense: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + 0.3 * torch.randn(weight.shape, generator=generator)
        for name, weight in feed_forwards(dense).items()
    }


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_mixture_of_equal_copies_is_the_dense_model(
    form: str, dense: Any, tmp_path: Path
) -> None:
    model = mix(dense, [feed_forwards(dense)] * 2, FORMS[form])
    ids = torch.randint(3, 50, (2, 40))
    expected = dense(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-4)
