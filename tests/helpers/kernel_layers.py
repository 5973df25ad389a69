"""Layers for the kernels of `fast`: an index on a grid of whole numbers, queries, and what plain
torch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from knn_moe.equations.mixing import confidence, mix_logits, propose_logits
from knn_moe.equations.similarity import cosine, rbf
from knn_moe.index import FastIndex, IndexConfig
from knn_moe.index.fast import index as index_module
from knn_moe.index.fast.fused import FusedRecall
from knn_moe.index.fast.grid import Grid
from knn_moe.index.fast.launch import recall
from knn_moe.index.fast.partition import Partition
from knn_moe.index.fast.tensors import KernelConfig, KernelTensors, prepare_tensors
from knn_moe.index.fast.values import PackedValues
from knn_moe.recall.layer import UNITS

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LISTS = [3, 150, 60, 1, 9, 40]  # keys of each list, around a point
STEP = 2.0**-6  # of the grid of whole numbers
KERNEL = torch.tensor([1.0, 0.6, 0.9], device=DEVICE)  # γ for weights, γ for λ, λ's factor
Recall = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def dtypes_of(path: str) -> list[object]:
    """The interpreter multiplies few queries in any dtype; torch more than a few only in fp32."""
    skipped = pytest.mark.skipif(not CUDA and path != "few", reason="needs a CUDA GPU")
    return [
        pytest.param(path, dtype, id=f"{path}-{dtype}", marks=skipped)
        for dtype in (torch.bfloat16, torch.float16)
    ]


@dataclass(frozen=True)
class Case:
    """Queries of an index: how many, of what, and what is asked."""

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
        asked = f"T{self.queries}-K{self.k}-{self.bits}/{self.value_bits}bits-N{self.experts}"
        kind = f"{'cosine' if self.cosine else 'rbf'}{'-padded' * self.padded}"
        return f"{asked}-d{self.width}-r{self.dims}-probes{self.probes}-top{self.top}-{kind}"


class Layer:
    """An index on a grid of whole numbers, values, queries and logits for a case."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
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
        """As many around each centre, on the grid. Result [n, d]."""
        around = self.centres[: len(sizes)].repeat_interleave(torch.tensor(sizes), dim=0)
        return self.on_grid(around + torch.randint(-6, 7, around.shape))

    def on_grid(self, points: Tensor) -> Tensor:
        return (points.to(DEVICE) * STEP + self.grid.centre).to(self.dtype)

    def tensors(self) -> KernelTensors:
        return prepare_tensors(self.index, self.values, KERNEL)

    def fused(self) -> FusedRecall:
        return FusedRecall(self.index, self.values, KERNEL, self.config)

    def recall(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return recall(inputs, logits, counts, real, self.tensors(), self.config)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Mixed logits and confidence, by plain torch."""
        squared_distance, places = self.index.estimate(self.inputs, self.case.k)
        similarity, (gamma, confidence_gamma, confidence_factor) = (
            cosine if self.case.cosine else rbf,
            KERNEL,
        )
        log_similarity = similarity(squared_distance, gamma)
        proposal = propose_logits(self.values.at(places), log_similarity)
        weight = confidence_factor * confidence(similarity(squared_distance, confidence_gamma))
        return mix_logits(self.logits.float(), proposal, weight), weight


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE)


def no_counts() -> Tensor:
    return torch.zeros(4, dtype=torch.int64, device=DEVICE)


def whole_grid(width: int, dims: int, dtype: torch.dtype) -> Grid:
    """A projection that picks coordinates, here and there, with a sign."""
    count = min(width, dims)
    projection = torch.zeros(dims, width)
    picked = torch.randperm(dims)[:count], torch.randperm(width)[:count]
    projection[picked] = (2.0 * torch.randint(2, (count,)) - 1) / STEP
    centre = STEP * torch.randint(-20, 21, (width,))
    grid = Grid(projection.to(dtype), projection @ centre, centre, torch.tensor(STEP))
    return Grid(*(part.to(DEVICE) for part in grid))


def check_recall(layer: Layer, asked: Recall) -> tuple[Tensor, Tensor]:
    """Mixed logits, confidence and counts as by plain torch, within what their dtype rounds."""
    counts = no_counts()
    mixed, weight = asked(layer.inputs, layer.logits, counts, layer.real)
    expected, expected_weight = layer.expected()
    assert (mixed.dtype, weight.dtype) == (layer.dtype, torch.float32)
    torch.testing.assert_close(weight, expected_weight, rtol=1e-4, atol=1e-4)
    rounding = max(1e-4, 2 * torch.finfo(layer.dtype).eps)
    torch.testing.assert_close(mixed.float(), expected, rtol=rounding, atol=rounding)
    check_counts(layer, counts, mixed, weight)
    return mixed, weight


def check_counts(layer: Layer, counts: Tensor, mixed: Tensor, weight: Tensor) -> None:
    """One call, its real tokens, of these the ones whose experts changed, and their confidence."""
    real = torch.ones_like(weight) if layer.real is None else layer.real
    calls, tokens, moved, units = counts.tolist()
    assert (calls, tokens) == (1, real.sum())
    assert moved == (changed(layer.logits, mixed, layer.case.top) * real).sum()
    assert abs(units - (weight.double() * real).sum().item() * UNITS) <= len(weight)


def changed(logits: Tensor, mixed: Tensor, top: int) -> Tensor:
    """Whether the top of one are not the top of the other; of a tie the first. Result [T] bool."""
    if top in (0, logits.shape[1]):
        return torch.zeros(len(logits), dtype=torch.bool, device=DEVICE)
    order = torch.argsort(logits.float(), dim=-1, descending=True, stable=True)
    ranked = mixed.float().gather(1, order)
    return ranked[:, top:].amax(dim=-1) > ranked[:, :top].amin(dim=-1)
