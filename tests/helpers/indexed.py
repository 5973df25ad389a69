"""Indexes to run models with, a model whose router inputs differ in length, and memories made of
parts of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.zoo import family, make_texts
from knn_moe import IndexConfig, RoutingConfig, RoutingMemory, attach
from knn_moe.equations.similarity import SIMILARITIES

CPU = torch.device("cpu")
MANY = make_texts(50)  # enough for two lists of `fast`, twenty of ivfpq
FAST = IndexConfig(kind="fast")
# And how far a typical token's logits may be from those of exact search, relative to the router's
# own. With another similarity the distance is at least 0.24, with shuffled values 1.8.
KINDS = {
    "fast": (FAST, 0.12),
    "fast, 8 bits": (IndexConfig(kind="fast", bits=8), 0.03),
    "fast, reranked": (IndexConfig(kind="fast", rerank=True), 0.02),
    "ivfpq": (IndexConfig(kind="ivfpq", dims=32), 0.01),
    "ivfpq, reranked": (IndexConfig(kind="ivfpq", dims=16, rerank=True), 0.001),
    "faiss-flat": (IndexConfig(kind="faiss-flat"), 0.001),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_similarity = pytest.mark.parametrize("similarity", SIMILARITIES)


def uneven() -> PreTrainedModel:
    """Return an OLMoE whose router inputs differ in length: no unit vectors."""
    model = family("olmoe")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.copy_(torch.linspace(0.2, 3, 32))
    return model


@torch.no_grad()
def run(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the model's logits, and those of its first router."""
    output = model(ids, use_cache=False, output_router_logits=True)
    return output.logits, output.router_logits[0]


def logits(
    model: PreTrainedModel, memory: RoutingMemory, config: RoutingConfig | None, ids: Tensor
) -> Tensor:
    with attach(model, memory, config):
        return run(model, ids)[0]


def off(found: Tensor, exact: Tensor, own: Tensor) -> float:
    """Return how far a typical token is from `exact`, relative to how far `own` is from it."""
    return float((found - exact).norm(dim=-1).median() / (own - exact).norm(dim=-1).median())


def meant_for(memory: RoutingMemory, **routing: Any) -> RoutingMemory:
    manifest = replace(memory.manifest, routing=replace(memory.routing, **routing))
    return replace(memory, manifest=manifest)


def of_rows(memory: RoutingMemory, rows: Tensor) -> RoutingMemory:
    layers = {
        number: replace(layer, keys=layer.keys[rows], values=layer.values[rows])
        for number, layer in memory.full_layers().items()
    }
    provenance = replace(memory.provenance, key=memory.provenance.key[rows])
    return replace(memory, layers=layers, provenance=provenance, folder=None)
