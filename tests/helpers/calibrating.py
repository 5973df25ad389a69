"""Texts that help to read each other, and a quick calibration of memories of them."""

from __future__ import annotations

import random

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.zoo import VOCABULARY, encode
from knn_moe import RoutingMemory, find_routers
from knn_moe.adapt.calibrate.fit import FitCases, FitData, look_up_neighbours
from knn_moe.config import CalibrationConfig
from knn_moe.reference.provenance import owners
from knn_moe.reference.splits import split

QUICK = CalibrationConfig(steps=48, step_tokens=64, neighbours=(1, 4), value_rates=(0.3,))


def sayings(count: int, seed: int = 0) -> list[str]:
    """Make texts of a few phrases in any order: what one says helps to read another."""
    draw = random.Random(seed)
    phrases = [[str(draw.randrange(3, VOCABULARY)) for _ in range(6)] for _ in range(5)]
    draw = random.Random(seed + 1)
    return [" ".join(word for _ in range(3) for word in draw.choice(phrases)) for _ in range(count)]


def mean_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> float:
    """Return the loss per token, one text at a time."""
    total, tokens = 0.0, 0
    for text in texts:
        ids = encode(tokenizer, text)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    return total / tokens


def open_cases(model: PreTrainedModel, memory: RoutingMemory) -> list[FitCases]:
    """Return the cases of every layer."""
    owner = owners(memory.provenance)[memory.provenance.window]
    layers = memory.full_layers()
    return [
        FitCases(router, layer.keys, layer.values, owner, layer.gamma)
        for router in find_routers(model)
        for layer in [layers[router.layer]]
    ]


def look_up(model: PreTrainedModel, memory: RoutingMemory, cases: list[FitCases]) -> FitData:
    """Look up four neighbours for the tokens that a calibration fits on."""
    batches = list(split(memory.reference_tokens(), QUICK).fit.batches(64))
    return look_up_neighbours(model, cases, batches, 4)
