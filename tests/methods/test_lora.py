"""LoRA adapters: every linear map gets one, in any family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.families import FAMILIES
from helpers.tiny import trained
from helpers.tuned import QUICK, quiz_split
from knn_moe import find_routers
from knn_moe.errors import UnsupportedModelError
from knn_moe.methods.lora import add_adapters, find_linear_maps
from knn_moe.methods.sft import apply_changes
from knn_moe.methods.training_loop import train
from knn_moe.support.embedded_models import EMBEDDED_MODELS


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_every_linear_map_gets_an_adapter_that_learns(name: str, tiny_tokenizer: Any) -> None:
    """As plain weights they give the same logits as they gave as adapters."""
    model = trained(name)
    split = quiz_split(model, tiny_tokenizer)
    batch = split.batch(split.validation)
    inputs = {"input_ids": batch.ids, "attention_mask": batch.real.long()}
    with torch.no_grad():
        alone = model(**inputs).logits
    with add_adapters(model, QUICK) as trainable:
        run = train(trainable, split, 1e-2, QUICK, seed=0)
        with torch.no_grad():
            adapted = trainable.model(**inputs).logits
    assert run.changes is not None
    routers = {router.layer: f"{router.name}.weight" for router in find_routers(model)}
    for layer, router in routers.items():
        own = {key for key in run.changes if f"layers.{layer}." in key}
        kinds = {"router" if key == router else last_part(key) for key in own}
        assert kinds == {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "router"
        }  # fmt: skip
        assert len(own) == 7
    for key, change in run.changes.items():
        assert change.left.abs().sum() > 0, key  # type: ignore[attr-defined]
        weight = model.get_parameter(key)
        assert change.apply_to(weight).shape == weight.shape
        factors = change.left, change.right  # type: ignore[attr-defined]
        assert all(QUICK.rank in factor.shape for factor in factors), key
    assert not any("lm_head" in key or "embed" in key for key in run.changes)
    with apply_changes(model, run.changes), torch.no_grad():
        merged = model(**inputs).logits
        assert len(find_routers(model)) == model.config.num_hidden_layers
    assert (merged - alone).abs().max() > 0.1
    torch.testing.assert_close(merged, adapted, atol=2e-4, rtol=1e-4)


def last_part(key: str) -> str:
    return next(piece for piece in reversed(key.split(".")) if piece != "weight")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_linear_maps_are_found_in_any_family(family: Any) -> None:
    """Every matrix is found, except those that are not meant: embeddings and convolutions."""
    model = family.build()
    if family.name == "dbrx":
        with pytest.raises(UnsupportedModelError, match="not matrices that can be tuned"):
            find_linear_maps(model)
        return
    maps = find_linear_maps(model)
    found = {f"{name}.weight" for name in maps.modules} | set(maps.parameters)
    names = {id(each): name for name, each in model.named_parameters()}
    assert {names[id(router.weight)] for router in find_routers(model)} <= found
    left_out = {
        name
        for name, each in model.named_parameters()
        if each.ndim > 1 and name not in found and "bias" not in name
    }
    # JetMoe's attention is a mixture as well, with a router that is not among those found.
    others = ("embed", "wte", "lm_head", "conv1d", ".conv.conv", "A_log", "self_attention.experts")
    assert not [name for name in left_out if not any(other in name for other in others)]


def test_quantised_experts_are_refused() -> None:
    model = trained("tiny-gpt-oss")
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            packed = getattr(experts, name).data.to(torch.float16).view(torch.uint8)
            delattr(experts, name)
            experts.register_buffer(name, packed)
    with pytest.raises(UnsupportedModelError, match=r"dequantize=True"):
        find_linear_maps(model)
