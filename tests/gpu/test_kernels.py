"""The kernels of `fast` on a real GPU, against plain torch, in every dtype and at a real size."""

from __future__ import annotations

import pytest
import torch

from helpers.kernel_layers import (
    CUDA,
    DEVICE,
    WIDTHS,
    Layer,
    LayerCase,
    check_recall,
    check_search,
    every_case,
    no_counts,
    randn,
    use_path,
)
from helpers.points import DTYPES, clustered, split
from knn_moe.equations.mixing import confidence, mix_logits, neighbour_weights, propose_logits
from knn_moe.equations.similarity import rbf
from knn_moe.index import FastIndex, IndexConfig
from knn_moe.index.fast.fused import FusedRecall
from knn_moe.index.fast.launch import DECODE_QUERIES
from knn_moe.index.fast.tensors import KernelConfig
from knn_moe.index.fast.values import PackedValues

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_case
def test_recall_and_search(
    path: str, case: LayerCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a grid of whole numbers, where the places found must be the same."""
    use_path(path, monkeypatch)
    layer = Layer(case, dtype)
    check_recall(layer, layer.fused())
    check_search(layer)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.usefixtures("compiled_state")
def test_compiled_code_recalls_the_same(queries: int) -> None:
    layer = Layer(LayerCase(queries=queries, k=2, padded=True), torch.bfloat16)
    check_recall(layer, torch.compile(layer.fused(), fullgraph=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_memory_of_many_lists(bits: int, dtype: torch.dtype) -> None:
    """The last list probed may differ; a call that is repeated gives the same result."""
    keys, queries = split(clustered(59_000, 512, clusters=300).to(DEVICE, dtype), queries=9000)
    index = FastIndex.build(keys, IndexConfig(kind="fast", bits=bits))
    values, logits = PackedValues.of(randn(len(keys), 64), 8), randn(9000, 64).to(dtype)
    distance, places = index.estimate(queries, 8)
    widths = torch.stack([1 / distance.median(), 0.5 / distance.median(), WIDTHS[2]])
    weights = neighbour_weights(rbf(distance, widths[0]))
    proposal = propose_logits(values.at(places), weights)
    weight = widths[2] * confidence(rbf(distance, widths[1]))
    expected = mix_logits(logits.float(), proposal, weight)
    layer = FusedRecall(index, values, widths, KernelConfig(8, index.probes, 0, 8))
    for count in (1, DECODE_QUERIES, DECODE_QUERIES + 1, 100, 300, 9000):
        arguments = queries[:count], logits[:count], no_counts(), None
        found = layer.search(queries[:count], 8)[1]
        assert (found == places[:count]).float().mean() > 0.9
        mixed, _ = layer(*arguments)
        near = torch.isclose(mixed.float(), expected[:count], rtol=1e-2, atol=2e-2)
        assert near.float().mean() > 0.9
        for _ in range(10):
            assert torch.equal(layer(*arguments)[0], mixed)
