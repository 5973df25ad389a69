"""A small model, and memories of texts that help to read each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, sayings
from helpers.zoo import BUILD, family
from knn_moe import RoutingConfig, RoutingMemory, build_memory, calibrate
from knn_moe.adapt.calibrate.result import Calibration

MOVED = replace(BUILD, steps=5, learning_rate=20.0)


@pytest.fixture(scope="module")
def olmoe() -> PreTrainedModel:
    """The zoo's OLMoE, shared by a file's tests, which leave it as it was."""
    return family("olmoe")


@pytest.fixture(scope="module")
def sayings_memory(olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast) -> RoutingMemory:
    """A memory of 40 sayings."""
    return build_memory(olmoe, zoo_tokenizer, sayings(40), MOVED)


@pytest.fixture(scope="module")
def small_memory(olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast) -> RoutingMemory:
    """A memory of 24 sayings, meant to be used with K = 4 and a wide kernel."""
    built = build_memory(olmoe, zoo_tokenizer, sayings(24), MOVED)
    routing = RoutingConfig(k=4, gamma_scale=0.5)
    return replace(built, manifest=replace(built.manifest, routing=routing))


@pytest.fixture(scope="module")
def calibration(olmoe: PreTrainedModel, sayings_memory: RoutingMemory) -> Calibration:
    """What calibration finds for `sayings_memory`."""
    return calibrate(olmoe, sayings_memory, config=QUICK)


@pytest.fixture(scope="module")
def olmoe_folder(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """`olmoe` and its tokenizer on disk."""
    folder = tmp_path_factory.mktemp("models") / "olmoe"
    olmoe.save_pretrained(folder)
    zoo_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def sayings_folder(sayings_memory: RoutingMemory, tmp_path: Path) -> Path:
    """A copy of `sayings_memory` on disk, to be written to."""
    sayings_memory.save_pretrained(tmp_path / "memory")
    return tmp_path / "memory"


@pytest.fixture
def small_folder(small_memory: RoutingMemory, tmp_path: Path) -> Path:
    """A copy of `small_memory` on disk, to be written to."""
    small_memory.save_pretrained(tmp_path / "memory")
    return tmp_path / "memory"
