"""Models that vLLM loads, memories for them, and the environment that vLLM's processes inherit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs here, where tests can look at it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import pytest
import torch

from compare import Reference
from knn_moe_vllm.export import export
from made import load, make_memories

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Return an embedded model as transformers runs it, with memories in folders."""
    made: dict[str, Reference] = {}

    def make(name: str) -> Reference:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            export(name, folder / "model")
            model, tokenizer = load(folder / "model")
            memories = make_memories(model, tokenizer, folder)
            made[name] = Reference(folder / "model", model, tokenizer, memories)
        return made[name]

    return make


@pytest.fixture(scope="session")
def olmoe(reference: Callable[[str], Reference]) -> Reference:
    """tiny-olmoe."""
    return reference("tiny-olmoe")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files of a test session."""
    return tmp_path_factory.mktemp("models")
