"""The equations of §4.2: exact at both ends, finite everywhere, the plain ratio in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from knn_moe.equations.mixing import confidence, mix_logits, neighbour_weights, propose_logits
from knn_moe.equations.similarity import SIMILARITIES

steady = settings(derandomize=True, deadline=None, max_examples=30)

sizes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5))  # tokens, K, experts
large = st.floats(-(2.0**100), 2.0**100, width=32)
ordinary = st.floats(-16, 16, width=32)
any_log = st.floats(-np.inf, 0, width=32)
distances = st.floats(0, np.inf, width=32)


def propose(values: Tensor, log_similarity: Tensor) -> Tensor:
    return propose_logits(values, neighbour_weights(log_similarity))


def tensors(shape: tuple[int, ...], elements: st.SearchStrategy[float]) -> st.SearchStrategy:
    return arrays(np.float32, shape, elements=elements).map(torch.from_numpy)


@st.composite
def recalled(
    draw: st.DrawFn,
    log_similarity: st.SearchStrategy[float] = any_log,
    values: st.SearchStrategy[float] = ordinary,
) -> tuple[Tensor, Tensor, Tensor]:
    """Router logits [T, N], neighbours' values [T, K, N] and log similarities [T, K]."""
    tokens, k, experts = draw(sizes)
    return (
        draw(tensors((tokens, experts), values)),
        draw(tensors((tokens, k, experts), values)),
        draw(tensors((tokens, k), log_similarity)),
    )


@given(case=recalled())
@steady
def test_confidence_is_the_mean_similarity(case: tuple[Tensor, Tensor, Tensor]) -> None:
    *_, log_similarity = case
    weight = confidence(log_similarity)
    assert ((weight >= 0) & (weight <= 1)).all()
    torch.testing.assert_close(weight, log_similarity.double().exp().mean(dim=-1).float())


@given(case=recalled(log_similarity=st.floats(-64, 0, width=32)))
@steady
def test_proposal_is_the_plain_ratio(case: tuple[Tensor, Tensor, Tensor]) -> None:
    _, values, log_similarity = case
    similarity = log_similarity.double().exp()
    ratio = similarity / similarity.sum(dim=-1, keepdim=True)
    expected = torch.einsum("tk,tkn->tn", ratio, values.double()).float()
    torch.testing.assert_close(propose(values, log_similarity), expected, rtol=0, atol=1e-4)


@given(case=recalled(log_similarity=st.integers(-8, 0).map(float)))
@steady
def test_proposal_keeps_the_ratio_where_similarities_underflow(
    case: tuple[Tensor, Tensor, Tensor],
) -> None:
    _, values, log_similarity = case
    far = log_similarity - 2.0**20
    assert far.exp().eq(0).all()
    assert torch.equal(propose(values, far), propose(values, log_similarity))


def test_proposal_leaves_out_a_neighbour_without_similarity() -> None:
    values = torch.tensor([[[1.0, 2.0], [30.0, 40.0]]])
    log_similarity = torch.tensor([[-5.0, -torch.inf]])
    assert propose(values, log_similarity).tolist() == [[1.0, 2.0]]


def test_proposal_of_neighbours_all_without_similarity_is_their_mean() -> None:
    values = torch.tensor([[[1.0, 2.0], [3.0, 6.0]]])
    assert propose(values, torch.full((1, 2), -torch.inf)).tolist() == [[2.0, 4.0]]


@given(case=recalled(values=large))
@steady
def test_proposal_lies_among_the_values(case: tuple[Tensor, Tensor, Tensor]) -> None:
    _, values, log_similarity = case
    proposal = propose(values, log_similarity)
    slack = 1e-5 * values.abs().amax(dim=1)
    assert (proposal >= values.amin(dim=1) - slack).all()
    assert (proposal <= values.amax(dim=1) + slack).all()


@given(case=recalled(), data=st.data())
@steady
def test_the_order_of_neighbours_is_nothing(
    case: tuple[Tensor, Tensor, Tensor], data: st.DataObject
) -> None:
    _, values, log_similarity = case
    order = data.draw(st.permutations(range(log_similarity.shape[1])))
    torch.testing.assert_close(confidence(log_similarity[:, order]), confidence(log_similarity))
    torch.testing.assert_close(
        propose(values[:, order], log_similarity[:, order]),
        propose(values, log_similarity),
        rtol=0,
        atol=1e-4,
    )


@given(case=recalled(log_similarity=distances, values=large), gamma=st.floats(2.0**-100, 2.0**100))
@pytest.mark.parametrize("name", SIMILARITIES)
@steady
def test_any_distance_gives_finite_logits(
    name: str, case: tuple[Tensor, Tensor, Tensor], gamma: float
) -> None:
    logits, values, squared_distance = case
    log_similarity = SIMILARITIES[name].log(squared_distance, torch.tensor(gamma))
    weight = confidence(log_similarity)
    mixed = mix_logits(logits, propose(values, log_similarity), weight)
    assert ((weight >= 0) & (weight <= 1)).all()
    assert mixed.isfinite().all()


@given(case=recalled(log_similarity=st.floats(-np.inf, -128, width=32), values=large))
@steady
def test_far_queries_keep_their_logits_exactly(case: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, values, log_similarity = case
    weight = confidence(log_similarity)
    assert weight.eq(0).all()
    assert torch.equal(mix_logits(logits, propose(values, log_similarity), weight), logits)


@given(case=recalled(log_similarity=st.just(0.0), values=large))
@steady
def test_one_neighbour_at_distance_zero_is_recalled_exactly(
    case: tuple[Tensor, Tensor, Tensor],
) -> None:
    logits, values, log_similarity = case
    proposal = propose(values[:, :1], log_similarity[:, :1])
    weight = confidence(log_similarity[:, :1])
    assert torch.equal(proposal, values[:, 0])
    assert torch.equal(mix_logits(logits, proposal, weight), values[:, 0])


@given(case=recalled(), weight=st.floats(0, 1, width=32))
@steady
def test_mixing_is_a_straight_line(case: tuple[Tensor, Tensor, Tensor], weight: float) -> None:
    logits, values, _ = case
    mixed = mix_logits(logits, values[:, 0], torch.full((len(logits),), weight))
    expected = (1 - weight) * logits.double() + weight * values[:, 0].double()
    torch.testing.assert_close(mixed, expected.float(), rtol=0, atol=1e-5)


def test_each_token_is_mixed_by_its_own_confidence() -> None:
    logits, proposal = torch.zeros(3, 2), torch.ones(3, 2)
    mixed = mix_logits(logits, proposal, torch.tensor([0.0, 0.25, 1.0]))
    assert mixed.tolist() == [[0.0, 0.0], [0.25, 0.25], [1.0, 1.0]]
