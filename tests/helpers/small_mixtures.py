"""The three forms of smol-moe, for the small Llama model and five branches."""

from __future__ import annotations

from upcycle import Mixture

FORMS = {
    "shards": Mixture(
        "mixtral",
        {"num_local_experts": 24, "num_experts_per_tok": 8, "intermediate_size": 8},
    ),
    "whole": Mixture(
        "mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "shared": Mixture(
        "glm4_moe",
        {
            "n_routed_experts": 20,
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
