"""A small corpus and a model trained on it, for the tests of the scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import train
from corpus import SEEN, read_texts, train_tokenizer
from helpers.small_corpus import RECIPE, STEPS, write_corpus
from train import TrainingRun


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def small_tokenizer(small_data: Path) -> Any:
    texts = [text for domain in SEEN for text in read_texts(small_data, domain, "train")]
    return train_tokenizer(texts, RECIPE.config["vocab_size"])


@pytest.fixture(scope="session")
def finished_run(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A training that has ended."""
    out = tmp_path_factory.mktemp("out")
    run = TrainingRun(small_data, out, "cpu", compiled=False, max_steps=STEPS)
    train.prepare_tokenizer(run, RECIPE)
    train.train(RECIPE, run)
    return run


@pytest.fixture(scope="session")
def least_folder(finished_run: TrainingRun) -> Path:
    return finished_run.out / RECIPE.name


@pytest.fixture(scope="session")
def least_model(least_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(least_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def run_script(small_data: Path, least_folder: Path) -> Callable[..., dict[str, Any]]:
    """Run a measuring script on the least model; return what it wrote to OUT/least.json."""

    def run(main: Callable[[list[str]], None], out: Path, *options: object) -> dict[str, Any]:
        places = ("--data", small_data, "--device", "cpu", "--out", out)
        main([str(part) for part in (least_folder, *places, *options)])
        found: dict[str, Any] = json.loads((out / "least.json").read_text(encoding="utf8"))
        return found

    return run
