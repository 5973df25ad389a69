"""A small model, and a memory of texts that help to read each other, for what calibrates it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from knn_moe.adapt.calibrate.splits import own_reference, split
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.zoo import BUILD, VOCABULARY, encode, family
from knn_moe import (
    RoutingMemory,
    build_memory,
    calibrate,
    find_routers,
)
from knn_moe.adapt.calibrate.fit import (
    Cases,
    Studied,
    find_neighbours,
)
from knn_moe.adapt.calibrate.result import Calibration
from knn_moe.config import CalibrationConfig
from knn_moe.reference.provenance import owners

QUICK = CalibrationConfig(steps=48, step_tokens=64, neighbours=(1, 4), value_rates=(0.3,))


def sayings(count: int, seed: int = 0) -> list[str]:
    """Texts of a few phrases in any order: what one says helps to read another."""
    draw = random.Random(seed)
    phrases = [[str(draw.randrange(3, VOCABULARY)) for _ in range(6)] for _ in range(5)]
    draw = random.Random(seed + 1)
    return [" ".join(word for _ in range(3) for word in draw.choice(phrases)) for _ in range(count)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return family("olmoe")


@pytest.fixture(scope="module")
def memory(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> RoutingMemory:
    config = replace(BUILD, steps=5, learning_rate=20.0)
    return build_memory(model, tokenizer, sayings(40), config)


@pytest.fixture(scope="module")
def found(model: PreTrainedModel, memory: RoutingMemory) -> Calibration:
    return calibrate(model, memory, config=QUICK)


@pytest.fixture
def folders(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    tmp_path: Path,
) -> tuple[Path, Path]:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    memory.save_pretrained(tmp_path / "memory")
    return tmp_path / "model", tmp_path / "memory"


def loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    total, tokens = 0.0, 0
    for text in texts:
        ids = encode(tokenizer, text)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    return total / tokens


def cases_of(model: PreTrainedModel, memory: RoutingMemory) -> list[Cases]:
    owner = owners(memory.provenance)[memory.provenance.window]
    layers = memory.full_layers()
    where = memory.provenance
    return [Cases.of(router, layers[router.layer], owner, where) for router in find_routers(model)]


def study(model: PreTrainedModel, memory: RoutingMemory, cases: list[Cases]) -> Studied:
    readings = list(split(own_reference(memory), QUICK).fitting.readings(64))
    return find_neighbours(model, cases, readings, 4)
