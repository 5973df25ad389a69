"""Fixtures to import: memories of a sparse and of a dense domain, and both as one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conftest import BUILD, encode, make_texts
from helpers.calibrating import sayings
from helpers.indexed import meant_for, uneven
from knn_moe import RoutingConfig, RoutingMemory, build_memory

# Each begins with a word of its own: no two cases are one, and none are as near as each other.
SPARSE = [f"{3 + place} {text}" for place, text in enumerate(make_texts(24, seed=1))]
DENSE = [f"{50 + place} {text}" for place, text in enumerate(sayings(24))]
USE = RoutingConfig(k=4, gamma_scale=0.5, confidence_scale=0.3)
FACTOR = 8.0  # the dense domain's γ, made larger still: nobody takes one for the other


def with_gamma(memory: RoutingMemory, factor: float) -> RoutingMemory:
    layers = {
        index: replace(layer, gamma=layer.gamma * factor)
        for index, layer in memory.full_layers().items()
    }
    return replace(memory, layers=layers)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return uneven()


@pytest.fixture(scope="module")
def sparse(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> RoutingMemory:
    return meant_for(build_memory(model, tokenizer, SPARSE, BUILD), **vars(USE))


@pytest.fixture(scope="module")
def dense(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> RoutingMemory:
    built = build_memory(model, tokenizer, DENSE, BUILD)
    return with_gamma(meant_for(built, **vars(USE)), FACTOR)


@pytest.fixture(scope="module")
def merged(sparse: RoutingMemory, dense: RoutingMemory) -> RoutingMemory:
    return sparse.merge(dense, by_domain=True)


@pytest.fixture(scope="module")
def ids(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Text like each domain's, and like neither."""
    texts = [make_texts(1, seed=1, shortest=18, longest=18)[0], sayings(1, seed=0)[0]]
    texts += make_texts(2, seed=9, shortest=18, longest=18)
    return torch.cat([encode(tokenizer, text) for text in texts])
