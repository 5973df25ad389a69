"""Exact search against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.points import DTYPES, squared_distances
from knn_moe.index import ExactIndex, exact

CPU = torch.device("cpu")


def check_search(keys: Tensor, queries: Tensor, k: int, rtol: float = 1e-5) -> None:
    distance, rows = ExactIndex(keys).search(queries, k)
    everything = squared_distances(queries, keys)
    expected = everything.sort(dim=-1).values[:, :k]
    assert (distance.dtype, rows.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(distance.double(), expected, rtol=rtol, atol=0)
    torch.testing.assert_close(everything.gather(1, rows), expected, rtol=rtol, atol=0)
    assert (distance >= 0).all()
    assert (distance.diff(dim=-1) >= 0).all()
    assert all(len(set(row)) == k for row in rows.tolist())


@given(data=st.data(), keys=st.integers(1, 300), dtype=st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_nearest_keys_as_by_brute_force(data: st.DataObject, keys: int, dtype: torch.dtype) -> None:
    k = data.draw(st.integers(1, keys), "k")
    queries, width = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 70))
    check_search(torch.randn(keys, width).to(dtype), torch.randn(queries, width).to(dtype), k)


@pytest.mark.parametrize(("offset", "noise"), [(1e3, 1.0), (-1e3, 0.01)])
def test_a_large_common_offset_does_not_cancel(offset: float, noise: float) -> None:
    keys, queries = (offset + noise * torch.randn(count, 64) for count in (300, 20))
    check_search(keys, queries, 4, rtol=1e-3)


def test_one_large_coordinate_does_not_hide_the_others() -> None:
    keys, queries = torch.randn(200, 32), torch.randn(20, 32)
    keys[:, 5] += 2000
    queries[:, 5] += 2000
    check_search(keys, queries, 4, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stored_key_is_at_distance_zero(dtype: torch.dtype) -> None:
    keys = (100 + torch.randn(60, 24)).to(dtype)
    distance, rows = ExactIndex(keys).search(keys, 1)
    assert distance.eq(0).all()
    assert rows.flatten().tolist() == list(range(60))


def test_every_duplicate_is_found() -> None:
    keys = torch.randn(20, 6).repeat(3, 1)
    distance, rows = ExactIndex(keys).search(keys[:20], 3)
    assert distance.eq(0).all()
    assert rows.sort(dim=-1).values.tolist() == [[row, row + 20, row + 40] for row in range(20)]


def test_ties_are_different_keys_at_one_distance() -> None:
    check_search(torch.cat([torch.eye(6), -torch.eye(6)]), torch.zeros(1, 6), 5)
    check_search(torch.full((8, 3), 7.0), torch.tensor([[7.0, 7, 7], [7, 8, 9]]), 8)
    # More equal keys than spare candidates.
    check_search(torch.cat([torch.randn(9, 5), torch.ones(30, 5)]), torch.ones(2, 5), 3)


@pytest.mark.parametrize(("size", "at_once", "k"), [(1, 1, 6), (9, 4, 1), (60, 100, 6)])
def test_blocks_change_nothing(
    size: int, at_once: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, queries = 3 + torch.randn(131, 10), 3 + torch.randn(11, 10)
    distance, rows = ExactIndex(keys).search(queries, k)
    monkeypatch.setitem(exact._KEYS, "cpu", size)
    monkeypatch.setitem(exact._QUERIES, "cpu", at_once)
    assert len(list(exact.row_blocks(131, CPU, at_least=k))) > 2
    in_blocks = ExactIndex(keys).search(queries, k)
    assert torch.equal(in_blocks[0], distance)
    assert torch.equal(in_blocks[1], rows)


def test_the_last_block_may_hold_fewer_keys_than_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exact._KEYS, "cpu", 1)
    check_search(torch.randn(17, 4), torch.randn(3, 4), 4)


@pytest.mark.parametrize(("rows", "at_least"), [(0, 1), (1, 1), (10, 40), (99, 7)])
def test_blocks_cover_every_row_once(
    rows: int, at_least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exact._KEYS, "cpu", 30)
    blocks = list(exact.row_blocks(rows, CPU, at_least))
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(rows))
    assert all(stop - start <= max(30, at_least) for start, stop in blocks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_of_centred_keys(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exact._KEYS, "cpu", 7)
    keys = (20 + torch.randn(45, 7)).to(dtype)
    centre, norms = exact.centred_norms(keys)
    mean = keys.double().mean(dim=0)
    torch.testing.assert_close(centre.double(), mean, rtol=1e-5, atol=0)
    expected = (keys.double() - mean).square().sum(dim=-1)
    torch.testing.assert_close(norms.double(), expected, rtol=1e-4, atol=0)


def test_distances_to_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_GATHERED", 2 * 3 * 4)
    queries, keys, rows = torch.randn(5, 4), torch.randn(9, 4), torch.randint(9, (5, 3))
    expected = squared_distances(queries, keys).gather(1, rows)
    found = exact.distances_to_rows(queries, keys, rows, scale=0.5)
    torch.testing.assert_close(found.double(), expected / 4, rtol=1e-5, atol=0)
    assert exact.distances_to_rows(queries[:0], keys, rows[:0]).shape == (0, 3)


def test_an_index_is_no_part_of_a_state_dict() -> None:
    assert not ExactIndex(torch.randn(4, 2)).state_dict()
