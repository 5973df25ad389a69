"""Models to measure on: published shapes with random weights. Speed and memory only, never quality.

Their tokenizer knows numbers only: each is the token with that id.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import nn

from knn_moe.support.registry import Registry

_SPECIAL: Final[Mapping[str, int]] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class ModelShape(NamedTuple):
    """An architecture, and the fields of its published config that decide its size."""

    architecture: str
    fields: Mapping[str, Any]

    @property
    def depth(self) -> int:
        depth: int = self.fields["num_hidden_layers"]
        return depth

    @property
    def vocabulary(self) -> int:
        vocabulary: int = self.fields["vocab_size"]
        return vocabulary


_PUBLISHED: Final = {
    "small": ModelShape(
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
    "olmoe-1b-7b": ModelShape(
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
    "gpt-oss-20b": ModelShape(
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
    "qwen3-30b-a3b": ModelShape(
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
SHAPES: Final[Registry[ModelShape]] = Registry("shape", _PUBLISHED)


def random_model(
    shape: str, device: torch.device, dtype: torch.dtype, *, layers: int | None = None
) -> nn.Module:
    """Make a model of a published shape with random weights, on the device where it will run.

    Args:
        shape: A name in SHAPES.
        device: Where the model is made.
        dtype: The dtype of its weights.
        layers: How many of its layers to make; None: all.

    Raises:
        ConfigError: There is no such shape.
    """
    name, fields = SHAPES.find(shape)
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
    """Return a real tokenizer for which the text "17 4 9" is the ids 17, 4, 9."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, **{str(number): number for number in range(1, vocabulary)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrap: Any = transformers.PreTrainedTokenizerFast
    return wrap(tokenizer_object=backend, pad_token="<pad>")


def random_texts(count: int, length: int, vocabulary: int) -> list[str]:
    """Return `count` texts of `length` tokens each."""
    draw = random.Random(0)
    return [
        " ".join(str(draw.randrange(3, vocabulary)) for _ in range(length)) for _ in range(count)
    ]
