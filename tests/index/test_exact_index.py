"""Exact search against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knn_moe.index import ExactIndex, exact, leave_one_out

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def all_distances(queries: Tensor, keys: Tensor) -> Tensor:
    return (queries.double()[:, None] - keys.double()).square().sum(dim=-1)


def check_search(keys: Tensor, queries: Tensor, k: int, rtol: float = 1e-5) -> None:
    distance, rows = ExactIndex(keys).search(queries, k)
    everything = all_distances(queries, keys)
    expected = everything.sort(dim=-1).values[:, :k]
    assert (distance.dtype, rows.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(distance.double(), expected, rtol=rtol, atol=0)
    torch.testing.assert_close(everything.gather(1, rows), expected, rtol=rtol, atol=0)
    assert (distance >= 0).all()
    assert (distance.diff(dim=-1) >= 0).all()
    assert all(len(set(row)) == k for row in rows.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("keys", "queries", "width", "k"),
    [
        (1, 1, 1, 1),
        (1, 5, 3, 1),
        (5, 0, 3, 2),
        (7, 1, 5, 7),
        (33, 17, 13, 5),
        (101, 9, 64, 101),
        (257, 31, 2, 3),
    ],
)
def test_nearest_keys_as_by_brute_force(
    keys: int, queries: int, width: int, k: int, dtype: torch.dtype
) -> None:
    check_search(torch.randn(keys, width).to(dtype), torch.randn(queries, width).to(dtype), k)


@pytest.mark.parametrize("offset", [1e3, -1e3])
@pytest.mark.parametrize("noise", [1.0, 0.01])
def test_a_large_common_offset_does_not_cancel(offset: float, noise: float) -> None:
    keys, queries = (offset + noise * torch.randn(count, 64) for count in (300, 20))
    check_search(keys, queries, 4, rtol=1e-3)


def test_one_large_coordinate_does_not_hide_the_others() -> None:
    keys, queries = torch.randn(200, 32), torch.randn(20, 32)
    keys[:, 5] += 2000
    queries[:, 5] += 2000
    check_search(keys, queries, 4, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 100])
def test_a_stored_key_is_at_distance_zero(dtype: torch.dtype, offset: int) -> None:
    keys = (offset + torch.randn(60, 24)).to(dtype)
    distance, rows = ExactIndex(keys).search(keys, 1)
    assert distance.eq(0).all()
    assert rows.flatten().tolist() == list(range(60))


def test_every_duplicate_is_found() -> None:
    keys = torch.randn(20, 6).repeat(3, 1)
    distance, rows = ExactIndex(keys).search(keys[:20], 3)
    assert distance.eq(0).all()
    assert rows.sort(dim=-1).values.tolist() == [[row, row + 20, row + 40] for row in range(20)]


def test_more_duplicates_than_spare_candidates() -> None:
    check_search(torch.cat([torch.randn(9, 5), torch.ones(30, 5)]), torch.ones(2, 5), 3)


def test_ties_are_different_keys_at_one_distance() -> None:
    keys = torch.cat([torch.eye(6), -torch.eye(6)])
    check_search(keys, torch.zeros(1, 6), 5)


def test_keys_all_alike() -> None:
    check_search(torch.full((8, 3), 7.0), torch.tensor([[7.0, 7, 7], [7, 8, 9]]), 8)


@pytest.mark.parametrize(("size", "at_once"), [(1, 1), (9, 4), (60, 100)])
@pytest.mark.parametrize("k", [1, 6])
def test_blocks_change_nothing(
    k: int, size: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, queries = 3 + torch.randn(131, 10), 3 + torch.randn(11, 10)
    distance, rows = ExactIndex(keys).search(queries, k)
    monkeypatch.setitem(exact._KEYS, "cpu", size)
    monkeypatch.setitem(exact._QUERIES, "cpu", at_once)
    assert len(list(exact.row_blocks(131, CPU, at_least=k))) > 2
    in_blocks = ExactIndex(keys).search(queries, k)
    assert torch.equal(in_blocks[0], distance)
    assert torch.equal(in_blocks[1], rows)


def test_the_last_block_may_hold_fewer_keys_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exact._KEYS, "cpu", 1)
    check_search(torch.randn(17, 4), torch.randn(3, 4), 4)


@pytest.mark.parametrize(("rows", "least"), [(0, 1), (1, 1), (10, 40), (99, 7)])
def test_spans_cover_every_row_once(rows: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exact._KEYS, "cpu", 30)
    spans = list(exact.row_blocks(rows, CPU, least))
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(rows))
    assert all(stop - start <= max(30, least) for start, stop in spans)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_of_centred_keys(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exact._KEYS, "cpu", 7)
    keys = (20 + torch.randn(45, 7)).to(dtype)
    centre, norms = exact.centred_norms(keys)
    mean = keys.double().mean(dim=0)
    torch.testing.assert_close(centre.double(), mean, rtol=1e-5, atol=0)
    expected = (keys.double() - mean).square().sum(dim=-1)
    torch.testing.assert_close(norms.double(), expected, rtol=1e-4, atol=0)


def test_an_index_is_no_part_of_a_state_dict() -> None:
    assert not ExactIndex(torch.randn(4, 2)).state_dict()


def test_two_bf16_numbers_are_nearly_one_of_fp32() -> None:
    """As split_dot_products multiplies on a GPU. One coordinate is large."""
    draw = torch.Generator().manual_seed(0)
    x, keys = (torch.randn(rows, 96, generator=draw) for rows in (40, 300))
    x[:, 3], keys[:, 3] = 50.0, 40.0
    parts = leave_one_out.split_factors(x, keys)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    true = x.double() @ keys.double().T
    found = (parts[0].double() @ parts[1].double().T - true).abs().max()
    rough = (x.bfloat16().double() @ keys.bfloat16().double().T - true).abs().max()
    assert found < 0.02
    assert rough > 50 * found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nearest_others_pass_over_their_own(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a sort of all distances, in blocks of queries and of keys; inf where none is left."""
    monkeypatch.setattr(leave_one_out, "_QUERIES", 7)
    monkeypatch.setitem(exact._KEYS, "cpu", 16)
    keys, owner = (10 + torch.randn(60, 5)).to(dtype), torch.randint(4, (60,))
    queries, asks = (10 + torch.randn(20, 5)).to(dtype), torch.randint(6, (20,))
    squared = all_distances(queries, keys)
    squared[asks[:, None] == owner] = float("inf")
    expected = squared.sort(dim=-1).values
    found, places = leave_one_out.search_leaving_out(
        queries, keys, [(asks, owner)], 50, keys.device
    )
    torch.testing.assert_close(found.double(), expected[:, :50], rtol=1e-5, atol=1e-6)
    there = found.isfinite()
    assert not there.all()
    torch.testing.assert_close(squared.gather(1, places)[there], expected[:, :50][there])
