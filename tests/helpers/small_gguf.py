"""Write a small Llama model and a byte-level tokenizer as a GGUF file, as llama.cpp does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def small_llama() -> Any:
    """Make a Llama model of random weights for the tokenizer of the file."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def vocabulary() -> list[str]:
    """Return special tokens, bytes, and one merge: two spaces."""
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]


def write_gguf(path: Path, model: Any) -> Path:
    """Write the model in fp32, its query and key rows in llama.cpp's order."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (config.vocab_size - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(gguf_name(name), llama_cpp_rows(name, weight, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def llama_cpp_rows(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Order the rows as llama.cpp's convert_hf_to_gguf.py does (`LlamaModel.permute`)."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape).contiguous()
