"""Fixtures of several packages: small models, their tokenizers and memories, files for commands."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it: tables would be narrow in its processes

if not torch.cuda.is_available():
    # Triton decides when a kernel is defined whether its interpreter runs it: set this before
    # transformers imports it.
    os.environ["TRITON_INTERPRET"] = "1"

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # torch's cache of compiled graphs mixes up CPUs that are emulated: each has its own.
    folder = Path(tempfile.gettempdir(), f"torchinductor-{capability}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.browser import chromium as chromium
from helpers.commands import run_cli, save_model
from helpers.tiny import trained, words
from helpers.zoo import BUILD, TEXTS, VOCABULARY, encode, family, make_texts
from knn_moe import RoutingMemory, build_memory
from knn_moe.bench.models import number_tokenizer

# What runs in the background ignores Ctrl-C, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Several threads add in any order, so that results differ in their last digits; and on a busy
    machine they wait for each other longer than these tests work."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def zoo_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are token ids, for every model of the zoo."""
    return number_tokenizer(VOCABULARY)


@pytest.fixture
def zoo_olmoe() -> PreTrainedModel:
    """The OLMoE of the zoo, with random weights; a new one for each test."""
    return family("olmoe")


@pytest.fixture(scope="session")
def zoo_memory(zoo_tokenizer: object) -> RoutingMemory:
    """A memory of TEXTS for `zoo_olmoe`."""
    return build_memory(family("olmoe"), zoo_tokenizer, TEXTS, BUILD)


@pytest.fixture
def prompt(zoo_tokenizer: Callable[..., dict[str, list[int]]]) -> torch.Tensor:
    """Nine tokens for a model of the zoo. Shape [1, 9]."""
    return encode(zoo_tokenizer, make_texts(1, seed=5, shortest=9, longest=9)[0])


@pytest.fixture(scope="module")
def tiny_olmoe() -> PreTrainedModel:
    """The embedded OLMoE, which is trained. `helpers.tiny.trained` loads the others."""
    return trained("tiny-olmoe")


@pytest.fixture(scope="module")
def tiny_tokenizer() -> Any:
    """The tokenizer of all embedded models."""
    return words()


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the zoo's OLMoE, for commands. Tests must not write into it."""
    return save_model("olmoe", tmp_path_factory.mktemp("models") / "olmoe")


@pytest.fixture(scope="session")
def reference_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TEXTS as a reference set on disk."""
    path = tmp_path_factory.mktemp("reference") / "ref.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="session")
def saved_memory(
    saved_model: Path, reference_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a memory of `reference_file`. Tests must not write into it."""
    folder = tmp_path_factory.mktemp("memories") / "memory"
    result = run_cli("build", saved_model, reference_file, "-o", folder, "--learning-rate", 5)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def compiled_state() -> Iterator[None]:
    """Forget compiled graphs before and after the test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
