"""Layers for the kernels of `fast`: indexes on a grid of whole numbers, and what torch finds there.

No number is rounded on that grid, so the kernels must find exactly the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from knn_moe.equations.mixing import confidence, mix_logits, neighbour_weights, propose_logits
from knn_moe.equations.similarity import cosine, rbf
from knn_moe.index import FastIndex, IndexConfig
from knn_moe.index.fast import index as index_module
from knn_moe.index.fast import launch
from knn_moe.index.fast.fused import FusedRecall
from knn_moe.index.fast.grid import Grid
from knn_moe.index.fast.launch import DECODE_QUERIES, recall, search
from knn_moe.index.fast.partition import Partition
from knn_moe.index.fast.tensors import KernelConfig, KernelTensors, prepare_tensors
from knn_moe.index.fast.values import PackedValues
from knn_moe.recall.layer import UNITS

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LISTS = [3, 150, 60, 1, 9, 40]  # keys of each list, around a point
STEP = 2.0**-6  # of the grid of whole numbers
WIDTHS = torch.tensor([1.0, 0.6, 0.9], device=DEVICE)  # γ for weights, γ for λ, λ's factor
Recall = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerCase:
    """An index, how many queries it gets, and what is asked of it."""

    queries: int
    k: int
    bits: int = 4
    value_bits: int = 8
    experts: int = 8
    width: int = 33
    dims: int = 64
    probes: int = 2
    cosine: int = 0
    top: int = 2
    padded: bool = False

    def __str__(self) -> str:
        sizes = f"T{self.queries}-K{self.k}-{self.bits}/{self.value_bits}bits-N{self.experts}"
        kind = f"{'cosine' if self.cosine else 'rbf'}{'-padded' * self.padded}"
        return f"{sizes}-d{self.width}-r{self.dims}-probes{self.probes}-top{self.top}-{kind}"


# By the kernels that serve them. Those of a prefill need `launch._SMALL_BATCH` to be less.
CASES = {
    "decode": [
        LayerCase(queries=DECODE_QUERIES, k=1, value_bits=4, probes=1, top=0),
        LayerCase(queries=1, k=16, bits=8, dims=128, experts=7, probes=3, cosine=1),
        LayerCase(queries=3, k=2, bits=8, value_bits=4, experts=60, width=64, top=8, padded=True),
        LayerCase(queries=1, k=3, width=201, dims=192, experts=1, probes=100, top=1),
    ],
    "small_batch": [
        LayerCase(queries=5, k=1, bits=8, value_bits=4, experts=7, dims=128, cosine=1, top=3),
        LayerCase(queries=5, k=4, width=201, dims=192, experts=60, probes=1, top=0, padded=True),
        LayerCase(queries=5, k=5, value_bits=4, experts=9, probes=1, top=9),
    ],
    "prefill": [
        LayerCase(queries=5, k=6, bits=8, width=64, experts=60, probes=4, top=8),
        LayerCase(queries=5, k=1, value_bits=4, experts=7, width=201, dims=192, probes=100),
        LayerCase(queries=20, k=3, bits=8, dims=128, experts=9, cosine=1, top=4, padded=True),
    ],
}
every_case = pytest.mark.parametrize(
    ("path", "case"),
    [pytest.param(path, case, id=f"{path}-{case}") for path in CASES for case in CASES[path]],
)


class Layer:
    """An index on a grid of whole numbers, values, queries and logits."""

    def __init__(self, case: LayerCase, dtype: torch.dtype = torch.float32) -> None:
        self.case, self.dtype = case, dtype
        self.grid = whole_grid(case.width, case.dims, dtype)
        self.centres = torch.randint(-60, 61, (len(LISTS), case.width))
        keys = self.points(LISTS)
        config = IndexConfig(kind="fast", probes=case.probes, dims=case.dims, bits=case.bits)
        begin = torch.tensor([0, *LISTS], device=DEVICE).cumsum(0)
        lists = Partition(torch.arange(len(keys), device=DEVICE), begin)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Grid, "fit", staticmethod(lambda *_: self.grid))
            patch.setattr(index_module, "partition", lambda _: lists)
            self.index = FastIndex.build(keys, config)
        self.values = PackedValues.of(randn(len(keys), case.experts), case.value_bits)
        self.config = KernelConfig(case.k, self.index.probes, case.cosine, case.top)
        self.inputs = self.points([-(-case.queries // 3)] * 3)[: case.queries]
        self.logits = randn(case.queries, case.experts).to(dtype)
        self.real = (torch.arange(case.queries) % 3 > 0).to(DEVICE) if case.padded else None

    def points(self, sizes: list[int]) -> Tensor:
        """Draw points on the grid, `sizes` of them around each centre. Result [n, d]."""
        around = self.centres[: len(sizes)].repeat_interleave(torch.tensor(sizes), dim=0)
        return self.on_grid(around + torch.randint(-6, 7, around.shape))

    def on_grid(self, points: Tensor) -> Tensor:
        return (points.to(DEVICE) * STEP + self.grid.centre).to(self.dtype)

    def tensors(self) -> KernelTensors:
        return prepare_tensors(self.index, self.values, WIDTHS)

    def fused(self) -> FusedRecall:
        return FusedRecall(self.index, self.values, WIDTHS, self.config)

    def recall(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return recall(inputs, logits, counts, real, self.tensors(), self.config)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return mixed logits and confidence, by plain torch."""
        squared_distance, places = self.index.estimate(self.inputs, self.case.k)
        similarity = cosine if self.case.cosine else rbf
        gamma, confidence_gamma, confidence_factor = WIDTHS
        weights = neighbour_weights(similarity(squared_distance, gamma))
        proposal = propose_logits(self.values.at(places), weights)
        weight = confidence_factor * confidence(similarity(squared_distance, confidence_gamma))
        return mix_logits(self.logits.float(), proposal, weight), weight


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE)


def no_counts() -> Tensor:
    return torch.zeros(4, dtype=torch.int64, device=DEVICE)


def whole_grid(width: int, dims: int, dtype: torch.dtype) -> Grid:
    """Return a grid whose projection picks coordinates at random, with a random sign."""
    count = min(width, dims)
    projection = torch.zeros(dims, width)
    picked = torch.randperm(dims)[:count], torch.randperm(width)[:count]
    projection[picked] = (2.0 * torch.randint(2, (count,)) - 1) / STEP
    centre = STEP * torch.randint(-20, 21, (width,))
    grid = Grid(projection.to(dtype), projection @ centre, centre, torch.tensor(STEP))
    return Grid(*(part.to(DEVICE) for part in grid))


def use_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few queries be served as a prefill; a few lists to each program, for all paths."""
    monkeypatch.setattr(launch, "_PROGRAMS", 2)
    if path == "prefill":
        monkeypatch.setattr(launch, "_SMALL_BATCH", 0)


def check_search(layer: Layer) -> None:
    """The same places as by plain torch, and the same distances."""
    distance, places = search(layer.inputs, layer.tensors(), layer.config)
    expected, expected_places = layer.index.estimate(layer.inputs, layer.case.k)
    assert (distance.dtype, places.dtype) == (torch.float32, torch.int64)
    assert torch.equal(places, expected_places)
    torch.testing.assert_close(distance, expected, rtol=1e-5, atol=1e-5)


def check_recall(layer: Layer, run: Recall) -> tuple[Tensor, Tensor]:
    """Mixed logits, confidence and counts as by plain torch, as exactly as the dtype allows."""
    counts = no_counts()
    mixed, weight = run(layer.inputs, layer.logits, counts, layer.real)
    expected, expected_weight = layer.expected()
    assert (mixed.dtype, weight.dtype) == (layer.dtype, torch.float32)
    torch.testing.assert_close(weight, expected_weight, rtol=1e-4, atol=1e-4)
    rounding = max(1e-4, 2 * torch.finfo(layer.dtype).eps)
    torch.testing.assert_close(mixed.float(), expected, rtol=rounding, atol=rounding)
    check_counts(layer, counts, mixed, weight)
    return mixed, weight


def check_counts(layer: Layer, counts: Tensor, mixed: Tensor, weight: Tensor) -> None:
    """One call, its real tokens, those of them whose experts changed, and the sum of λ."""
    real = torch.ones_like(weight) if layer.real is None else layer.real
    calls, tokens, moved, units = counts.tolist()
    assert (calls, tokens) == (1, real.sum())
    assert moved == (changed(layer.logits, mixed, layer.case.top) * real).sum()
    assert abs(units - (weight.double() * real).sum().item() * UNITS) <= len(weight)


def changed(logits: Tensor, mixed: Tensor, top: int) -> Tensor:
    """Return whether the top experts differ, ties to the first. Result [T] bool."""
    if top in (0, logits.shape[1]):
        return torch.zeros(len(logits), dtype=torch.bool, device=DEVICE)
    order = torch.argsort(logits.float(), dim=-1, descending=True, stable=True)
    ranked = mixed.float().gather(1, order)
    return ranked[:, top:].amax(dim=-1) > ranked[:, :top].amin(dim=-1)
