"""FAISS in a running program: threads, the compiler, autocast; where it is missing or damaged."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from index.test_faiss import ALL, CPU, FLAT, IVFPQ, RERANK, _silent, build, name  # noqa: F401
from knn_moe.config import IndexConfig
from knn_moe.errors import MemoryFormatError, MissingDependencyError
from knn_moe.index import faiss as module
from knn_moe.index.faiss import FaissIndex

faiss = pytest.importorskip("faiss")


def test_few_queries_have_few_threads_and_the_setting_is_restored() -> None:
    before = faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(4)
        for kind, queries, threads in [
            ("faiss-flat", 0, 1),
            ("faiss-flat", 1, 1),
            ("faiss-flat", 9, 4),
            ("ivfpq", 15, 1),
            ("ivfpq", 16, 2),
            ("ivfpq", 999, 4),
        ]:
            with module._threads(queries, kind):
                assert faiss.omp_get_max_threads() == threads
            assert faiss.omp_get_max_threads() == 4
    finally:
        faiss.omp_set_num_threads(before)


@pytest.mark.parametrize("config", ALL, ids=name)
@pytest.mark.usefixtures("compiled_state")
def test_a_compiled_model_can_search(config: IndexConfig) -> None:
    layers = [build(torch.randn(50, 2), config) for _ in range(10)]

    def model(x: Tensor) -> Tensor:
        for index in layers:
            distance, rows = index.search(x * 1, 2)
            x = x + distance + rows
        return x

    compiled = torch.compile(model, backend="eager")
    for count in (4, 5, 1):
        queries = torch.randn(count, 2, requires_grad=True)
        assert torch.equal(compiled(queries), model(queries))


def test_importing_it_does_not_import_the_compiler() -> None:
    check = "import sys, knn_moe.index.faiss; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize("config", ALL, ids=name)
def test_gradients_and_autocast_change_nothing(config: IndexConfig) -> None:
    index, queries = build(torch.randn(300, 24), config), torch.randn(20, 24)
    expected = index.search(queries, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = index.search(queries.requires_grad_(), 3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not found[0].requires_grad


@pytest.mark.parametrize("config", [FLAT, IVFPQ], ids=name)
def test_without_faiss_the_cure_is_named(
    config: IndexConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = build(torch.randn(5, 4), config).tensors()
    monkeypatch.setitem(sys.modules, "faiss", None)
    again = runpy.run_path(str(module.__file__))["FaissIndex"]  # importing needs no faiss
    message = rf"'{config.kind}' needs FAISS, .*: pip install faiss-cpu$"
    with pytest.raises(MissingDependencyError, match=message):
        again.build(torch.randn(5, 4), config, CPU)
    with pytest.raises(MissingDependencyError, match=message):
        again.load(tensors, config, CPU)


def test_a_damaged_index_says_so() -> None:
    tensors = build(torch.randn(30, 8), RERANK).tensors()
    with pytest.raises(MemoryFormatError, match=r"damaged .*Build it again"):
        FaissIndex.load({**tensors, "faiss": tensors["faiss"][:100]}, RERANK, CPU)
    del tensors["keys"], tensors["correction"]
    with pytest.raises(MemoryFormatError, match=r"lacks correction, keys\. Build it again"):
        FaissIndex.load(tensors, RERANK, CPU)
