"""Models to measure on: published shapes with random weights. Speed and memory only, never quality.

Token ids stand for themselves: the tokenizer's vocabulary is the numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import transformers
from torch import nn

from knn_moe.errors import ConfigError

_SPECIAL: Final[Mapping[str, int]] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Architecture and the fields of its published config that decide its shape.
SHAPES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "small": (
        "Olmoe",
        {
            "vocab_size": 4096,
            "hidden_size": 192,
            "intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "num_experts": 16,
            "num_experts_per_tok": 4,
        },
    ),
    "olmoe-1b-7b": (
        "Olmoe",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "gpt-oss-20b": (
        "GptOss",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
}


def random_model(
    shape: str, device: torch.device, dtype: torch.dtype, *, layers: int | None = None
) -> nn.Module:
    """The shape's architecture with random weights, made where it will run; `layers`: its first."""
    if shape not in SHAPES:
        raise ConfigError(f"Unknown shape {shape!r}. Available: {', '.join(SHAPES)}.")
    name, fields = SHAPES[shape]
    depth = {} if layers is None else {"num_hidden_layers": layers}
    config = getattr(transformers, f"{name}Config")(**{**fields, **_SPECIAL, **depth})
    build: Callable[[Any], nn.Module] = getattr(transformers, f"{name}ForCausalLM")
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with device:
            return build(config).eval()
    finally:
        torch.set_default_dtype(before)


def number_tokenizer(vocabulary: int) -> Any:
    """A real tokenizer for which the text "17 4 9" is the ids 17, 4, 9."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, **{str(number): number for number in range(1, vocabulary)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrap: Any = transformers.PreTrainedTokenizerFast
    return wrap(tokenizer_object=backend, pad_token="<pad>")


def random_texts(count: int, length: int, vocabulary: int) -> list[str]:
    """`count` texts of `length` tokens each."""
    draw = random.Random(0)
    return [
        " ".join(str(draw.randrange(3, vocabulary)) for _ in range(length)) for _ in range(count)
    ]
