"""Loading a model and its tokenizer by one name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.commands import save_model
from knn_moe import RoutingMemory, find_routers, load_model
from knn_moe.errors import ConfigError, ModelError, ModelTooLargeError
from knn_moe.routers import load


def test_an_embedded_model_is_loaded_ready_to_be_used() -> None:
    model, tokenizer = load_model("tiny-olmoe")
    assert type(model).__name__ == "OlmoeForCausalLM"
    assert model.dtype == torch.bfloat16
    assert not model.training
    inputs = tokenizer("The import statement", return_tensors="pt").to(model.device)
    assert model.generate(**inputs, max_new_tokens=2).shape[1] > inputs["input_ids"].shape[1]


def test_an_embedded_model_comes_before_a_folder_of_its_name(
    zoo_memory: RoutingMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo_memory.save_pretrained(tmp_path / "tiny-olmoe")
    monkeypatch.chdir(tmp_path)
    assert len(find_routers(load.load_structure("tiny-olmoe"))) == 6


@pytest.mark.parametrize("dtype", ["float32", torch.float32])
def test_the_precision_and_the_device_are_chosen(dtype: Any) -> None:
    for device in ("cpu", torch.device("cpu")):
        model, _ = load_model("tiny-qwen3", device=device, dtype=dtype)
        assert (model.dtype, model.device.type) == (torch.float32, "cpu")


def test_a_folder_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model("olmoe", tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (folder, str(folder), "~/model"):
        model, tokenizer = load_model(name)
        assert len(tokenizer) == model.config.vocab_size


def test_what_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"'tiny-olmo'. Did you mean 'tiny-olmoe'"):
        load_model("tiny-olmo")
    with pytest.raises(ModelError, match=r"nowhere.*no such folder. Embedded models: tiny-olmoe"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"by its name, and a NoneType is none. Embedded models"):
        load_model(None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="Cannot run on device 'gpu'"):
        load_model("tiny-olmoe", device="gpu")
    for dtype in ("fp32", "int8", "Tensor", 32, torch.int8):
        with pytest.raises(ConfigError, match='dtype must be "auto" or name'):
            load_model("tiny-olmoe", dtype=dtype)  # type: ignore[arg-type]
    monkeypatch.setattr(load, "available_memory", lambda: 1000)
    with pytest.raises(ModelTooLargeError, match="GB of weights, and this machine has"):
        load_model("tiny-olmoe")
