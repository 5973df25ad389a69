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
    """An architecture, and what its published config says of its size."""

    architecture: str
    vocabulary: int
    hidden_size: int
    intermediate_size: int
    depth: int
    heads: int
    key_value_heads: int
    experts_per_token: int
    others: Mapping[str, Any]  # the fields that only some architectures have

    def config_fields(self) -> dict[str, Any]:
        """Return the fields by their names in transformers."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "num_experts_per_tok": self.experts_per_token,
            **self.others,
            **_SPECIAL,
        }


_QWEN3: Final = {
    "num_experts": 128, "moe_intermediate_size": 768, "head_dim": 128, "norm_topk_prob": True,
}  # fmt: skip
# As experiments/recipes/olmoe-80m.json trains it.
_OLMOE_80M: Final = {
    "num_experts": 32, "tie_word_embeddings": True, "max_position_embeddings": 1024,
}  # fmt: skip
_GPT_OSS: Final = {"num_local_experts": 32, "head_dim": 64, "sliding_window": 128}
SHAPES: Final[Registry[ModelShape]] = Registry(
    "shape",
    {
        "small": ModelShape("Olmoe", 4096, 192, 96, 6, 6, 6, 4, {"num_experts": 16}),
        "olmoe-80m": ModelShape("Olmoe", 4096, 384, 256, 8, 6, 6, 4, _OLMOE_80M),
        "olmoe-1b-7b": ModelShape("Olmoe", 50304, 2048, 1024, 16, 16, 16, 8, {"num_experts": 64}),
        "gpt-oss-20b": ModelShape("GptOss", 201088, 2880, 2880, 24, 64, 8, 4, _GPT_OSS),
        "qwen3-30b-a3b": ModelShape("Qwen3Moe", 151936, 2048, 6144, 48, 32, 4, 8, _QWEN3),
    },
)


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
    found = SHAPES.find(shape)
    depth = {} if layers is None else {"num_hidden_layers": layers}
    name = found.architecture
    config = getattr(transformers, f"{name}Config")(**(found.config_fields() | depth))
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
