"""The models in the package: real, small, trained, and what their papers say they are."""

from __future__ import annotations

import json
import math
import socket
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from corpus import END, PAD, SEEN, UNSEEN, find_data_folder, load_validation_windows
from expert_balance import losses_by_domain
from helpers.commands import run_cli
from knn_moe import build_memory
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model, public_name
from knn_moe.tasks.likelihood import token_losses

CLASSES = {
    "tiny-olmoe": "OlmoeForCausalLM",
    "tiny-qwen3": "Qwen3MoeForCausalLM",
    "tiny-gpt-oss": "GptOssForCausalLM",
}
STORY = """\
It was raining when she came home that evening. Her mother sat by the window with a book in her
lap, and the old dog slept beside the fire. "You are late," she said, without looking up. The girl
took off her wet coat and put it over the chair. "I know," she said. "I walked along the river,
because I wanted to see the boats before the winter."
"""
PROGRAM = '''\
import os
import sys


class Reader:
    """Reads files, one after the other."""

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding

    def read(self):
        with open(self.path, encoding=self.encoding) as f:
            return f.read()


def main():
    if len(sys.argv) < 2:
        print("usage: reader.py FILE")
        sys.exit(1)
    for name in sys.argv[1:]:
        if not os.path.exists(name):
            raise ValueError("no such file: %s" % name)
        print(Reader(name).read())
'''

every_model = pytest.mark.parametrize("name", EMBEDDED_MODELS)


@cache
def load(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(embedded_model(name), dtype=torch.float32).eval()


@cache
def tokenizer_of(name: str) -> Any:
    return AutoTokenizer.from_pretrained(embedded_model(name))


def training(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(embedded_model(name), "training.json").read_text())
    return facts


def test_the_names_are_known() -> None:
    assert tuple(CLASSES) == EMBEDDED_MODELS


@every_model
def test_loads_without_a_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, place: asked.append(place))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *place, **options: asked.append(place) or [])
    model = AutoModelForCausalLM.from_pretrained(embedded_model(name))
    tokenizer = AutoTokenizer.from_pretrained(embedded_model(name))
    assert asked == []
    assert type(model) is getattr(transformers, CLASSES[name])
    assert model.dtype == torch.bfloat16
    assert len(tokenizer) == model.config.vocab_size == 4096
    for token, place in ((END, model.config.eos_token_id), (PAD, model.config.pad_token_id)):
        assert tokenizer.convert_tokens_to_ids(token) == place


@every_model
def test_weights_are_few_finite_and_stored_in_bf16(name: str) -> None:
    stored = 0
    with safe_open(Path(embedded_model(name), "model.safetensors"), "pt") as weights:
        for key in weights.keys():  # noqa: SIM118  # not a mapping
            tensor = weights.get_tensor(key)
            assert tensor.dtype == torch.bfloat16, key
            assert tensor.isfinite().all(), key
            stored += tensor.numel()
    parameters = sum(parameter.numel() for parameter in load(name).parameters())
    assert stored == parameters == training(name)["parameters"] <= 8_000_000


def test_all_of_them_are_small_together() -> None:
    files = Path(embedded_model("tiny-olmoe")).parent.rglob("*")
    assert sum(path.stat().st_size for path in files if path.is_file()) <= 50_000_000


def test_they_share_one_tokenizer() -> None:
    rules = {Path(embedded_model(name), "tokenizer.json").read_bytes() for name in EMBEDDED_MODELS}
    assert len(rules) == 1


@pytest.mark.parametrize(
    "text",
    [
        STORY,
        PROGRAM,
        "",
        " ",
        "\n\n\n  a\r\n\tb  \n",
        "it 's a test , is n't it ?",
        "3.14159 and 1234567890",
        "Größe, naïve, 日本語, عربى, Ω ≈ ∑ λ, 👩‍👩‍👧 e\u0301",
        "\x00\x1f\x7f\ufeff\ufffd",
    ],
)
def test_text_survives_its_tokens(text: str) -> None:
    tokenizer = tokenizer_of("tiny-olmoe")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@given(text=st.text())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_text_survives_its_tokens(text: str) -> None:
    tokenizer = tokenizer_of("tiny-olmoe")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_numbers_are_read_digit_by_digit() -> None:
    assert tokenizer_of("tiny-olmoe").tokenize("2024") == ["2", "0", "2", "4"]


@every_model
@pytest.mark.parametrize("text", [STORY, PROGRAM], ids=["story", "program"])
def test_is_trained(name: str, text: str) -> None:
    model = load(name)
    ids = torch.tensor([tokenizer_of(name)(text)["input_ids"]])
    shuffled = ids[:, torch.randperm(ids.shape[1])]
    loss, scrambled = (float(token_losses(model, x, 1).nll.mean()) for x in (ids, shuffled))
    assert loss < math.log(model.config.vocab_size) / 2 < 4.5
    assert loss < scrambled - 3


@every_model
def test_training_ended_where_more_would_not_help(name: str) -> None:
    facts = training(name)
    assert facts["recipe"] == name
    assert facts["domains"] == list(SEEN)
    assert set(facts["losses"]) == {*SEEN, *UNSEEN}
    valid = facts["history"]["valid"]
    assert abs(valid[-1] - valid[-2]) < 0.02 < valid[0] - valid[-1]
    assert min(valid) > valid[-1] - 0.02  # nor did it go too far
    seen = sum(facts["losses"][domain] for domain in SEEN) / len(SEEN)
    assert valid[-1] == pytest.approx(seen, abs=2e-4)
    assert all(facts["losses"][domain] > seen for domain in UNSEEN)


@every_model
def test_all_experts_work_and_not_all_on_the_same(name: str) -> None:
    config, experts = load(name).config, training(name)["experts"]
    assert len(experts["load"]) == len(experts["busiest"]) == config.num_hidden_layers
    assert max(experts["busiest"]) < 2
    assert min(experts["idlest"]) > 0.3
    apart = experts["divergence"]
    assert apart["python"]["fiction"] > 2 * apart["fiction"]["tinystories"] > 0
    assert all(apart[domain][domain] == 0 for domain in SEEN)


@pytest.mark.slow
@every_model
def test_what_was_measured_is_found_again(name: str) -> None:
    if not find_data_folder().is_dir():
        pytest.skip(
            f"no data at {find_data_folder()}: set KNN_MOE_DATA to compare with the real text"
        )
    few = load_validation_windows(tokenizer_of(name), find_data_folder(), ("python",))["python"][
        ::10
    ]
    assert len(few) == 20
    found = losses_by_domain(load(name), {"python": few})["python"]
    assert found == pytest.approx(training(name)["losses"]["python"], abs=0.25)


def test_any_other_name_stays_as_it_is() -> None:
    for name in ("allenai/OLMoE-1B-7B-0125", "./tiny-olmoe", "tiny", ""):
        assert embedded_model(name) == public_name(name) == name
    for name in EMBEDDED_MODELS:
        assert public_name(embedded_model(name)) == name


@every_model
def test_a_memory_names_the_model_and_not_where_it_lies(name: str, tmp_path: Path) -> None:
    memory = build_memory(load(name), tokenizer_of(name), [STORY], folder=tmp_path / "memory")
    assert memory.base_model.name == name
    assert memory.base_model.architecture == CLASSES[name]
    assert memory.manifest.tokenizer["name"] == name
    written = [path for path in (tmp_path / "memory").iterdir() if path.suffix in (".json", ".md")]
    assert written
    assert not any(str(Path(embedded_model(name)).parent) in path.read_text() for path in written)


@every_model
def test_the_command_line_knows_them(name: str) -> None:
    result = run_cli("routers", name, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert [router["layer"] for router in shown] == list(range(6))
    assert {(router["num_experts"], router["top_k"]) for router in shown} == {(16, 4)}
    assert f"{name} has 6 routers" in run_cli("routers", name).stdout
