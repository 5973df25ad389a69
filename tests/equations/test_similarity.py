"""Similarities: between 0 and 1, falling with distance, and finite whatever the vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from knn_moe.equations.similarity import SIMILARITIES, rbf, unit

steady = settings(derandomize=True, deadline=None, max_examples=40)
every_similarity = pytest.mark.parametrize("name", SIMILARITIES)

distances = st.floats(0, np.inf, width=32)
gammas = st.floats(2.0**-100, 2.0**100, width=32)
any_finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-100, 100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)


def vectors(elements: st.SearchStrategy[float], count: int = 1) -> st.SearchStrategy[Tensor]:
    shapes = st.integers(1, 9).map(lambda d: (count, d))
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=elements)).map(
        torch.from_numpy
    )


pairs = vectors(ordinary, count=2).filter(lambda pair: bool(pair.any(dim=1).all()))


def similarity_of(name: str, x: Tensor, k: Tensor, gamma: float = 1.0) -> Tensor:
    similarity = SIMILARITIES[name]
    squared = (similarity.prepare(x) - similarity.prepare(k)).square().sum(dim=-1)
    return similarity.log(squared, torch.tensor(gamma)).exp()


@every_similarity
@given(distance=distances, gamma=gammas)
@steady
def test_similarity_is_between_zero_and_one(name: str, distance: float, gamma: float) -> None:
    log = SIMILARITIES[name].log(torch.tensor([distance]), torch.tensor(gamma))
    assert log <= 0
    assert 0 <= log.exp() <= 1


@every_similarity
@given(pair=st.tuples(distances, distances).map(sorted), gamma=gammas)
@steady
def test_farther_is_never_more_similar(name: str, pair: list[float], gamma: float) -> None:
    nearer, farther = SIMILARITIES[name].log(torch.tensor(pair), torch.tensor(gamma))
    assert nearer >= farther


@every_similarity
@given(gamma=gammas)
@steady
def test_distance_zero_is_similarity_one(name: str, gamma: float) -> None:
    assert SIMILARITIES[name].log(torch.zeros(3), torch.tensor(gamma)).exp().eq(1).all()


@every_similarity
@given(pair=vectors(any_finite, count=2))
@steady
def test_finite_vectors_give_a_number(name: str, pair: Tensor) -> None:
    assert 0 <= similarity_of(name, pair[:1], pair[1:]) <= 1


@given(distance=st.floats(0, 100, width=32), gamma=st.floats(2.0**-10, 1, width=32))
@steady
def test_rbf_is_the_papers_kernel(distance: float, gamma: float) -> None:
    log = rbf(torch.tensor([distance]), torch.tensor(gamma))
    assert float(log.double().exp()) == pytest.approx(np.exp(-gamma * distance), rel=1e-5)


def test_rbf_takes_a_gamma_of_its_own_for_each_row() -> None:
    log = rbf(torch.ones(2, 3), torch.tensor([[1.0], [2.0]]))
    assert log.tolist() == [[-1.0] * 3, [-2.0] * 3]


@given(x=vectors(any_finite))
@steady
def test_unit_has_length_one_whatever_the_norm(x: Tensor) -> None:
    length = float(unit(x).double().norm())
    assert length == pytest.approx(1 if x.any() else 0, abs=1e-6)


@given(x=vectors(ordinary), power=st.integers(-100, 100))
@steady
def test_unit_forgets_the_length(x: Tensor, power: int) -> None:
    torch.testing.assert_close(unit(x * 2.0**power), unit(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unit_keeps_the_dtype_and_the_direction(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, -4.0], [6e4, 0.0], [0.0, 0.0]], dtype=dtype)
    expected = torch.tensor([[0.6, -0.8], [1.0, 0.0], [0.0, 0.0]], dtype=dtype)
    assert torch.equal(unit(x), expected)


@given(pair=pairs)
@steady
def test_cosine_is_the_cosine_clamped(pair: Tensor) -> None:
    x, k = pair[:1], pair[1:]
    expected = F.cosine_similarity(x.double(), k.double()).clamp(0, 1).float()
    torch.testing.assert_close(similarity_of("cosine", x, k), expected, rtol=0, atol=1e-6)


def test_opposite_vectors_have_no_cosine_similarity() -> None:
    x = torch.tensor([[1.0, 2.0]])
    assert similarity_of("cosine", x, -3 * x) == 0


def test_cosine_has_no_gamma() -> None:
    distance = torch.linspace(0, 4, 9)
    log = SIMILARITIES["cosine"].log
    assert torch.equal(log(distance, torch.tensor(0.1)), log(distance, torch.tensor(9.0)))
    assert {name for name, entry in SIMILARITIES.items() if entry.uses_gamma} == {"rbf", "rbf-unit"}


@given(pair=pairs, scale=st.floats(2.0**-20, 2.0**20, width=32))
@steady
def test_rbf_unit_sees_angles_only(pair: Tensor, scale: float) -> None:
    x, k = pair[:1], pair[1:]
    angle = F.cosine_similarity(x.double(), k.double())
    expected = torch.exp(-0.7 * 2 * (1 - angle)).float()
    got = similarity_of("rbf-unit", x * scale, k, gamma=0.7)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
