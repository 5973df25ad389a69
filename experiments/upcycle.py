"""Turn a dense model and copies of it into a Mixture of Experts (Branch-Train-MiX).

Shared by `train_smol_moe.py` and the tests; not a script of its own. A branch is a copy of the
dense model that was trained on one domain, and differs from it in its feed-forwards only. Each
feed-forward is cut into shards of equal width, and every shard becomes an expert. The shards of a
feed-forward have the same router row at the start, so that they are chosen together and the model
starts as a mixture of whole feed-forwards. `router_fit.py` makes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from knn_moe.routers.find import block_of, find_routers

Weights = Mapping[str, Tensor]  # feed-forward weights by their names in the dense model

_SHAPE: Final = (  # fields that the dense model's config hands to the mixture's
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@dataclass(frozen=True)
class Mixture:
    """The form of a mixture: its transformers family and the fields of its config.

    Attributes:
        model_type: The family's name in transformers.
        config: Fields of its config beyond the dense model's shape: experts, their width, top-k.
        shared: The share of the original feed-forward, which is then a shared expert that every
            token uses. With 0 the original is cut into experts like the branches.
        router_spread: How large a token's logits are at the start: the mean standard deviation
            over the branches.
    """

    model_type: str
    config: Mapping[str, Any]
    shared: float = 0.0
    router_spread: float = 1.0


def feed_forwards(model: Any) -> dict[str, Tensor]:
    """Return the weights of a dense model's feed-forwards, by name."""
    return {name: weight for name, weight in model.state_dict().items() if is_feed_forward(name)}


def is_feed_forward(name: str) -> bool:
    """Return whether a dense model's weight belongs to a feed-forward."""
    return ".mlp." in name


@torch.no_grad()
def mix(dense: Any, branches: Sequence[Weights], rows: Tensor, mixture: Mixture) -> Any:
    """Make a mixture of the dense model and its branches, on the same device and in its dtype.

    The original's row is the mean of the branches' rows, as if it were fitted to the mean of their
    targets, so that it is chosen where fewer branches than the router chooses stand out.

    Args:
        dense: The dense model.
        branches: The feed-forwards of its trained copies.
        rows: The branches' router rows at unit spread, [layers, branches, d].
        mixture: The form.

    Raises:
        ValueError: The number of experts is not a whole number of shards for each feed-forward.
    """
    model = _make_model(dense, mixture)
    rest = {k: v for k, v in dense.state_dict().items() if not is_feed_forward(k)}
    unexpected = model.load_state_dict(rest, strict=False).unexpected_keys
    if unexpected:
        raise ValueError(f"{mixture.model_type!r} has no place for {unexpected}.")
    original = feed_forwards(dense)
    copies = list(branches) if mixture.shared else [original, *branches]
    rows = rows * mixture.router_spread
    if not mixture.shared:
        rows = torch.cat([rows.mean(dim=1, keepdim=True), rows], dim=1)
    for router in find_routers(model):
        block: Any = block_of(model, router.name)
        shards = _count_shards(block.experts, len(copies), dense.config.intermediate_size)
        for place, weights in enumerate(copies):
            part = slice(place * shards, (place + 1) * shards)
            gate, up, down = _three_matrices(weights, router.layer)
            # The gate weights of chosen shards add up to 1, so each shard counts `shards` times.
            down = down * (shards * (1 - mixture.shared))
            block.experts.gate_up_proj[part] = torch.cat([_cut(gate, shards), _cut(up, shards)], 1)
            block.experts.down_proj[part] = _cut(down.T, shards).transpose(1, 2)
        if mixture.shared:
            gate, up, down = _three_matrices(original, router.layer)
            block.shared_experts.gate_proj.weight.copy_(gate)
            block.shared_experts.up_proj.weight.copy_(up)
            block.shared_experts.down_proj.weight.copy_(down * mixture.shared)
        router.weight.copy_(rows[router.layer].repeat_interleave(shards, dim=0))
    return model


def _make_model(dense: Any, mixture: Mixture) -> Any:
    fields = {name: getattr(dense.config, name) for name in _SHAPE}
    # A copy, because a config completes the dictionary it is given.
    fields["rope_parameters"] = dict(dense.config.rope_parameters)
    config = AutoConfig.for_model(mixture.model_type, **{**fields, **mixture.config})
    with torch.device(dense.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dense.dtype)  # type: ignore[no-untyped-call]
    return model.eval()


def _count_shards(experts: Any, copies: int, width: int) -> int:
    """Return how many experts each feed-forward is cut into."""
    count, _, expert_width = experts.down_proj.shape
    shards = width // expert_width
    if shards * expert_width != width or shards * copies != count:
        raise ValueError(
            f"{count} experts of width {expert_width} cannot hold {copies} feed-forwards of width "
            f"{width}. Choose {copies} × S experts of width {width} / S."
        )
    return int(shards)


def _three_matrices(weights: Weights, layer: int) -> list[Tensor]:
    names = ("gate", "up", "down")
    return [weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in names]


def _cut(matrix: Tensor, shards: int) -> Tensor:
    """Cut a matrix into blocks of rows. Shapes: [width, d] → [shards, width / shards, d]."""
    return matrix.reshape(shards, -1, matrix.shape[-1])
