"""A zoo of tiny, randomly initialised models, one for each MoE family of transformers.

For each family this file knows: its real causal-LM class, a config that keeps the model small while
leaving what is peculiar to the family at work (expert groups, router biases, zero experts, dense
layers among the sparse ones, hybrid token mixers), which decoder layers hold an MoE feed-forward
block, how wide the router's logits are, and how many experts a token is sent to.

Weights are drawn so that routing is neither flat nor degenerate: matrices wide, biases (also those
that only steer the choice of experts) small but not zero, norms as the model initialises them. They
depend on the family's name alone, and the global random state is left as it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 128
NUM_EXPERTS = 8
TOP_K = 2
MATRIX_STD = 0.25
BIAS_STD = 0.05


@dataclass(frozen=True)
class Family:
    """One MoE family; `name` is the `model_type` of its (text) config."""

    name: str
    build: Callable[[], PreTrainedModel]
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def __repr__(self) -> str:
        return self.name


def _draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    def normal(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                normal(tensor, BIAS_STD)
            elif name.endswith(("router.scale", "per_expert_scale")):
                normal(tensor, BIAS_STD, mean=1.0)
            elif isinstance(tensor, torch.nn.Parameter) and tensor.ndim >= 2:
                normal(tensor, MATRIX_STD)


def _build(name: str, class_name: str, config: dict[str, Any]) -> PreTrainedModel:
    model_class = getattr(transformers, class_name)
    seed = zlib.crc32(name.encode())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**deepcopy(config)))
    _draw_weights(model, torch.Generator().manual_seed(seed))
    return model.eval()


def _family(
    name: str,
    class_name: str,
    moe_layers: tuple[int, ...],
    *shared: dict[str, Any],
    router_width: int = NUM_EXPERTS,
    **own: Any,
) -> Family:
    config = {key: value for part in (*shared, own) for key, value in part.items()}
    build = partial(_build, name, class_name, config)
    return Family(name, build, moe_layers, router_width, TOP_K)


TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {
    **TOKENS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
# Every layer sparse.
DECODER = {**WIDTHS, "intermediate_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
# A dense layer and two sparse ones, whose experts have a width of their own.
MIXED = {**DECODER, "num_hidden_layers": 3, "moe_intermediate_size": 16}

EXPERTS = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
LOCAL_EXPERTS = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
ROUTED_EXPERTS = {
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": 1,
}
GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
DEEPSEEK = {**ROUTED_EXPERTS, **GROUPS, "first_k_dense_replace": 1}

LATENT_ATTENTION = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

FAMILIES: tuple[Family, ...] = (
    _family("olmoe", "OlmoeForCausalLM", (0, 1), DECODER, EXPERTS),
    _family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (0, 2),
        MIXED,
        EXPERTS,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    _family(
        "gpt_oss",
        "GptOssForCausalLM",
        (0, 1),
        DECODER,
        LOCAL_EXPERTS,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    _family("mixtral", "MixtralForCausalLM", (0, 1), DECODER, LOCAL_EXPERTS),
    _family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        (0, 2),
        MIXED,
        EXPERTS,
        mlp_only_layers=[1],
        shared_expert_intermediate_size=16,
    ),
    _family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (0, 2),
        MIXED,
        EXPERTS,
        DELTA_NET,
        mlp_only_layers=[1],
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    ),
    _family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        (1, 2),
        MIXED,
        DEEPSEEK,
        LATENT_ATTENTION,
        num_key_value_heads=4,
        topk_method="group_limited_greedy",
    ),
    _family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (1, 2),
        MIXED,
        DEEPSEEK,
        LATENT_ATTENTION,
        num_key_value_heads=4,
    ),
    _family("glm4_moe", "Glm4MoeForCausalLM", (1, 2), MIXED, DEEPSEEK),
    _family("granitemoe", "GraniteMoeForCausalLM", (0, 1), DECODER, LOCAL_EXPERTS),
    _family(
        "phimoe",
        "PhimoeForCausalLM",
        (0, 1),
        DECODER,
        LOCAL_EXPERTS,
        router_jitter_noise=0.25,  # the published 0.01 leaves nearly every weight at exactly 1
    ),
    _family(
        "jamba",
        "JambaForCausalLM",
        (1, 3),
        DECODER,
        EXPERTS,
        num_hidden_layers=4,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    _family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        (1, 2),
        MIXED,
        moe_num_experts=NUM_EXPERTS,
        moe_k=TOP_K,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    _family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        (0, 1),
        DECODER,
        num_experts=NUM_EXPERTS,
        moe_topk=TOP_K,
        head_dim=8,
    ),
    _family(
        "minimax",
        "MiniMaxForCausalLM",
        (0, 1),
        DECODER,
        LOCAL_EXPERTS,
        head_dim=8,
        block_size=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    _family("minimax_m2", "MiniMaxM2ForCausalLM", (0, 1), DECODER, LOCAL_EXPERTS, head_dim=8),
    _family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        (1, 2),
        MIXED,
        EXPERTS,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
    _family("flex_olmo", "FlexOlmoForCausalLM", (0, 1), DECODER, EXPERTS),
    _family("dots1", "Dots1ForCausalLM", (1, 2), MIXED, DEEPSEEK, norm_topk_prob=True),
    _family(
        "llama4_text",
        "Llama4ForCausalLM",
        (1, 3),
        DECODER,
        LOCAL_EXPERTS,
        num_hidden_layers=4,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=32,
        head_dim=8,
    ),
    _family(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        (1, 2),
        DECODER,
        EXPERTS,
        num_hidden_layers=3,
        head_dim=8,
        num_shared_experts=1,
        expert_selection_fn="sigmoid",
        logit_scale=1.0,
        mlp_layer_types=["dense", "sparse", "sparse"],
        prefix_dense_intermediate_size=32,
    ),
    _family(
        "dbrx",
        "DbrxForCausalLM",
        (0, 1),
        TOKENS,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": NUM_EXPERTS, "moe_top_k": TOP_K},
    ),
    _family(
        "jetmoe",
        "JetMoeForCausalLM",
        (0, 1),
        TOKENS,
        LOCAL_EXPERTS,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        max_position_embeddings=128,
    ),
    _family(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        (0, 1),
        WIDTHS,
        LATENT_ATTENTION,
        router_width=NUM_EXPERTS + 4,
        num_layers=2,
        num_hidden_layers=4,  # attention blocks, two to a layer
        head_dim=8,
        ffn_hidden_size=32,
        expert_ffn_hidden_size=16,
        n_routed_experts=NUM_EXPERTS,
        zero_expert_num=4,
        moe_topk=TOP_K,
        routed_scaling_factor=1.5,
    ),
    _family(
        "afmoe",
        "AfmoeForCausalLM",
        (1, 2),
        MIXED,
        EXPERTS,
        head_dim=8,
        num_dense_layers=1,
        num_shared_experts=1,
        route_scale=1.5,
        global_attn_every_n_layers=2,
    ),
    _family(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        (1, 2),
        MIXED,
        EXPERTS,
        GROUPS,
        num_shared_experts=1,
        first_k_dense_replace=1,
        sliding_window_pattern=2,
    ),
    _family(
        "nemotron_h",
        "NemotronHForCausalLM",
        (1, 3),
        WIDTHS,
        ROUTED_EXPERTS,
        GROUPS,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe", "mlp"],
        intermediate_size=32,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        moe_latent_size=16,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=8,
    ),
    _family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        (0, 1),
        DECODER,
        enable_moe_block=True,
        num_experts=NUM_EXPERTS,
        top_k_experts=TOP_K,
        moe_intermediate_size=16,
        head_dim=8,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    _family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        (0, 1),
        DECODER,
        LOCAL_EXPERTS,
        shared_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        mamba_n_heads=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    _family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        (0, 1),
        WIDTHS,
        EXPERTS,
        DELTA_NET,
        num_hidden_layers=2,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
)
