"""Public functions that are given something else say what it is, and memories go by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.text_task import text_data
from helpers.zoo import TEXTS
from knn_moe import (
    KnnMoeError,
    RoutingConfig,
    RoutingMemory,
    build_calibrated,
    build_memory,
    calibrate,
    compress,
    control,
    evaluate,
    find_routers,
    prune,
)
from knn_moe.methods import KnnMoe, ZeroShot


def test_what_is_given_is_named(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: Any, zoo_memory: RoutingMemory, tmp_path: Path
) -> None:
    def evaluated() -> object:
        return evaluate(zoo_olmoe, zoo_tokenizer, "t.jsonl", ZeroShot(), folder=tmp_path)  # type: ignore[arg-type]

    def by_name() -> object:
        return evaluate(zoo_olmoe, zoo_tokenizer, data, "knn", folder=tmp_path)  # type: ignore[arg-type]

    data = text_data()
    build: Callable[..., object] = build_memory
    name = type(zoo_tokenizer).__name__
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: build(zoo_tokenizer, zoo_olmoe, TEXTS), f"a {name} is none"),
        (lambda: build(zoo_olmoe, TEXTS, TEXTS), "tokenizer is needed.*a list of 12 is none"),
        (lambda: build(zoo_olmoe, None, TEXTS), "tokenizer is needed.*None is none"),
        (lambda: build((zoo_olmoe, None), None, TEXTS), "tuple of 2 is none. load_model returns"),
        (lambda: build(zoo_olmoe, zoo_tokenizer, TEXTS, RoutingConfig()), "got a RoutingConfig"),
        (lambda: build_calibrated("my/model", None, TEXTS), r"load_model\('my/model'\)"),  # type: ignore[arg-type]
        (lambda: find_routers("my/model"), r"load_model\('my/model'\)"),  # type: ignore[arg-type]
        (lambda: calibrate(zoo_memory, zoo_olmoe), "The model comes first, and the memory"),  # type: ignore[arg-type]
        (lambda: compress(None, "fast", tmp_path / "out"), "None is neither"),  # type: ignore[arg-type]
        (lambda: prune(zoo_olmoe, [zoo_memory]), "a list of 1 is neither"),  # type: ignore[arg-type]
        (evaluated, r"'t.jsonl' \(of type str\) has none: open_task"),
        (by_name, r"by a method, such as ZeroShot\(\).* and 'knn' \(of type str\) is none"),
    ]
    for call, words in calls:
        with pytest.raises(KnnMoeError, match=words):
            call()
    assert list(tmp_path.iterdir()) == []


def test_memories_are_worked_on_by_their_folders(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, tmp_path: Path
) -> None:
    folder = tmp_path / "memory"
    zoo_memory.save_pretrained(folder)
    shuffled = control(folder, "shuffled")
    expected = control(zoo_memory, "shuffled")
    for layer in expected.full_layers():
        assert torch.equal(
            shuffled.full_layers()[layer].values, expected.full_layers()[layer].values
        )
    assert len(prune(None, str(folder), 0.5, by="chance")) == round(len(zoo_memory) / 2)
    assert compress(folder, "fast", tmp_path / "fast").compressed
    assert len(KnnMoe(folder).memory) == len(zoo_memory)  # type: ignore[arg-type]
