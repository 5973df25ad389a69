"""Search among other examples' keys, against a sort of all distances."""

from __future__ import annotations

import pytest
import torch

from helpers.points import squared_distances
from knn_moe.index import exact, leave_one_out
from knn_moe.index.leave_one_out import search_leaving_out, split_factors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_that_share_a_label_are_left_out(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of queries and of keys, by two labels; inf where no key is left."""
    monkeypatch.setattr(leave_one_out, "_QUERIES", 7)
    monkeypatch.setitem(exact._KEYS, "cpu", 16)
    keys, queries = ((10 + torch.randn(count, 5)).to(dtype) for count in (60, 20))
    labels = [(torch.randint(6, (20,)), torch.randint(4, (60,))) for _ in range(2)]
    squared = squared_distances(queries, keys)
    for own, other in labels:
        squared[own[:, None] == other] = float("inf")
    expected = squared.sort(dim=-1).values
    found, rows = search_leaving_out(queries, keys, labels, 50, keys.device)
    torch.testing.assert_close(found.double(), expected[:, :50], rtol=1e-5, atol=1e-6)
    there = found.isfinite()
    assert there.any()
    assert not there.all()
    torch.testing.assert_close(squared.gather(1, rows)[there], expected[:, :50][there])


def test_no_queries_and_more_keys_wanted_than_there_are() -> None:
    keys = torch.randn(3, 5)
    assert search_leaving_out(keys[:0], keys, [], 9, keys.device)[0].shape == (0, 3)


def test_two_bf16_numbers_are_nearly_one_of_fp32() -> None:
    """As a GPU multiplies them. One coordinate is large."""
    x, keys = torch.randn(40, 96), torch.randn(300, 96)
    x[:, 3], keys[:, 3] = 50.0, 40.0
    factors = split_factors(x, keys)
    assert all(part.dtype == torch.bfloat16 for part in factors)
    true = x.double() @ keys.double().T
    error = (factors[0].double() @ factors[1].double().T - true).abs().max()
    rough = (x.bfloat16().double() @ keys.bfloat16().double().T - true).abs().max()
    assert error < 0.02
    assert rough > 50 * error
