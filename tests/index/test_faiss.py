"""FAISS's indexes against brute force in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from knn_moe.config import IndexConfig
from knn_moe.index import ExactIndex
from knn_moe.index import faiss as module
from knn_moe.index.faiss import FaissIndex

faiss = pytest.importorskip("faiss")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    (1, 1, 1, 1),
    (1, 5, 3, 1),
    (5, 0, 3, 2),
    (7, 1, 5, 7),
    (33, 17, 13, 5),
    (101, 9, 64, 101),
    (257, 31, 2, 3),
]
FLAT = IndexConfig(kind="faiss-flat")
IVFPQ = IndexConfig(kind="ivfpq")
RERANK = IndexConfig(kind="ivfpq", rerank=True)
ALL = [FLAT, IVFPQ, RERANK]


@pytest.fixture(autouse=True)
def _silent(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert capfd.readouterr() == ("", "")


def name(value: object) -> str | None:
    if isinstance(value, IndexConfig):
        return f"{value.kind}{'+rerank' * value.rerank}"
    return str(value) if isinstance(value, torch.dtype) else None


def build(keys: Tensor, config: IndexConfig) -> FaissIndex:
    return FaissIndex.build(keys, config, CPU)


def all_distances(queries: Tensor, keys: Tensor) -> Tensor:
    return (queries.double()[:, None] - keys.double()).square().sum(dim=-1)


def check_form(distance: Tensor, rows: Tensor, shape: tuple[int, int]) -> None:
    assert distance.shape == rows.shape == shape
    assert (distance.dtype, rows.dtype) == (torch.float32, torch.int64)
    assert (distance >= 0).all()
    assert (distance.diff(dim=-1) >= 0).all()
    assert all(len(set(row)) == shape[1] for row in rows.tolist())


def check_flat(keys: Tensor, queries: Tensor, k: int) -> None:
    """A distance changes by no more than its key does when rounded to 11 bits."""
    distance, rows = build(keys, FLAT).search(queries, k)
    check_form(distance, rows, (len(queries), k))
    everything = all_distances(queries, keys)
    extent = all_distances(keys.double().mean(dim=0, keepdim=True), keys).max().sqrt().item()
    close = {"rtol": 1e-5, "atol": extent / 2**11 + 1e-30}
    for expected in (everything.sort(dim=-1).values[:, :k], everything.gather(1, rows)):
        torch.testing.assert_close(distance.double().sqrt(), expected.sqrt(), **close)


def check_exact(
    config: IndexConfig, keys: Tensor, queries: Tensor, k: int, rtol: float = 1e-5
) -> None:
    distance, rows = build(keys, config).search(queries, k)
    check_form(distance, rows, (len(queries), k))
    everything = all_distances(queries, keys)
    expected = everything.sort(dim=-1).values[:, :k]
    torch.testing.assert_close(distance.double(), expected, rtol=rtol, atol=0)
    torch.testing.assert_close(everything.gather(1, rows), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(("keys", "queries", "width", "k"), SHAPES)
def test_flat_finds_the_nearest_to_fp16(
    keys: int, queries: int, width: int, k: int, dtype: torch.dtype
) -> None:
    check_flat(torch.randn(keys, width).to(dtype), torch.randn(queries, width).to(dtype), k)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(("keys", "queries", "width", "k"), SHAPES)
def test_reranked_distances_are_exact(
    keys: int, queries: int, width: int, k: int, dtype: torch.dtype
) -> None:
    stored, asked = torch.randn(keys, width).to(dtype), torch.randn(queries, width).to(dtype)
    distance, rows = build(stored, RERANK).search(asked, k)
    check_form(distance, rows, (queries, k))
    found = all_distances(asked, stored).gather(1, rows)
    torch.testing.assert_close(distance.double(), found, rtol=1e-5, atol=0)
    if 4 * k + 16 >= keys:  # every key was a candidate
        check_exact(RERANK, stored, asked, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("offset", [0, 20])
def test_few_keys_in_all_their_dimensions_are_quantised_without_loss(
    offset: int, dtype: torch.dtype
) -> None:
    """Up to 256 keys each has a code of its own: what is left is projection and rounding."""
    keys, queries = ((offset + torch.randn(count, 12)).to(dtype) for count in (200, 30))
    check_exact(IndexConfig(kind="ivfpq", dims=12), keys, queries, 5, rtol=1e-3)


def test_what_the_projection_drops_is_added() -> None:
    """‖Px - Pk‖² + ‖x'‖² + ‖k'‖² - 2ρ‖x'‖‖k'‖ - a‖Px - Pk‖² - surplus."""
    keys, queries = 3 + torch.randn(200, 64), 3 + torch.randn(30, 64)
    index = build(keys, IVFPQ)
    distance, rows = index.search(queries, 200)
    tensors = index.tensors()
    axes = tensors["projection"].double()
    alike, nearer, surplus, _ = tensors["correction"].tolist()
    assert axes.shape == (64, 8)
    torch.testing.assert_close(axes.T @ axes, torch.eye(8).double(), rtol=0, atol=1e-5)
    centred, asked = (x.double() - keys.double().mean(dim=0) for x in (keys, queries))
    near = all_distances(asked @ axes, centred @ axes)
    dropped = [(x - x @ axes @ axes.T).square().sum(dim=-1) for x in (asked, centred)]
    assert recall(index.search(queries, 5)[1], near.sort(dim=-1).indices[:, :5]) > 0.99
    norms = dropped[0][:, None].sqrt(), dropped[1].sqrt()
    expected = near + (norms[0] - norms[1]).square() + 2 * (1 - alike) * norms[0] * norms[1]
    expected -= nearer * near + surplus / tensors["scale"].item() ** 2
    torch.testing.assert_close(distance.double(), expected.gather(1, rows), rtol=1e-3, atol=0)
    assert distance.mean().item() == pytest.approx(
        all_distances(queries, keys).mean().item(), rel=0.1
    )


def test_the_projection_keeps_what_varies_most() -> None:
    keys = torch.randn(300, 16)
    keys[:, [2, 11]] *= 10
    axes = build(keys, IVFPQ).tensors()["projection"]
    assert axes[[2, 11]].square().sum().item() == pytest.approx(2, abs=0.02)


def power_law(rows: int, width: int = 128) -> Tensor:
    spread = torch.arange(1, width + 1) ** -0.7
    return (torch.randn(rows, width) * spread) @ torch.linalg.qr(torch.randn(width, width)).Q


def clustered(rows: int, width: int = 128) -> Tensor:
    return 100 + (power_law(rows // 20, width).repeat(20, 1) * 3 + power_law(rows, width))


def recall(rows: Tensor, expected: Tensor) -> float:
    return (rows[:, :, None] == expected[:, None, :]).any(dim=-1).float().mean().item()


@pytest.mark.parametrize("make", [power_law, clustered])
def test_most_neighbours_are_found_among_many(
    make: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = make(4000).bfloat16()[torch.randperm(4000)]
    keys, queries = vectors[:3900], vectors[3900:]
    expected = ExactIndex(keys).search(queries, 10)[1]
    monkeypatch.setattr(module, "_SAMPLE", 3000)
    index = build(keys, IndexConfig(kind="ivfpq", dims=32, rerank=True))
    assert recall(index.search(queries, 10)[1], expected) > 0.9
    assert recall(index.search(queries, 1)[1], expected[:, :1]) > 0.9
    plain = FaissIndex.load(index.tensors(), IndexConfig(kind="ivfpq", dims=32), CPU)
    assert recall(plain.search(queries, 10)[1], expected) > 0.6
    assert recall(build(keys, FLAT).search(queries, 10)[1], expected) > 0.98


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_distances_are_right_on_average(offset: float) -> None:
    """Neighbours are alike in what the projection drops; without the correction they seem far."""
    vectors = clustered(4000)[torch.randperm(4000)] + offset
    keys, queries = vectors[:3800], vectors[3800:]
    index = build(keys, IVFPQ)
    tensors = index.tensors()
    distance, rows = index.search(queries, 16)
    check_form(distance, rows, (200, 16))
    true = all_distances(queries, keys).gather(1, rows)
    assert distance.mean().item() == pytest.approx(true.mean().item(), rel=0.15)
    assert (distance / true).mean().item() == pytest.approx(1, abs=0.2)
    nothing = {**tensors, "correction": torch.zeros(4)}
    before, same_rows = FaissIndex.load(nothing, IVFPQ, CPU).search(queries, 16)
    assert before.mean() > 2 * true.mean()
    assert torch.equal(rows.sort(dim=-1).values, same_rows.sort(dim=-1).values)
    assert torch.equal(FaissIndex.load(tensors, IVFPQ, CPU).search(queries, 16)[0], distance)


def test_a_query_too_far_off_for_fp32_is_infinitely_far() -> None:
    keys, queries = torch.zeros(300, 16), torch.zeros(1, 16)
    keys[:, :2] = torch.randn(300, 2)
    queries[0, 5] = 1e25
    assert build(keys, IVFPQ).search(queries, 2)[0].isposinf().all()


@pytest.mark.parametrize("config", ALL, ids=name)
@pytest.mark.parametrize("copies", [3, 40])
def test_every_duplicate_is_found(config: IndexConfig, copies: int) -> None:
    keys = torch.randn(20, 6).repeat(copies, 1)
    distance, rows = build(keys, config).search(keys[:20], copies)
    assert (rows.sort(dim=-1).values % 20 == torch.arange(20)[:, None]).all()
    check_form(distance, rows, (20, copies))


@pytest.mark.parametrize("config", [FLAT, RERANK], ids=name)
def test_ties_are_different_keys_at_one_distance(config: IndexConfig) -> None:
    keys = torch.cat([torch.eye(6), -torch.eye(6)])
    check_exact(config, keys, torch.zeros(1, 6), 5)


@pytest.mark.parametrize("config", ALL, ids=name)
@pytest.mark.parametrize("count", [1, 8, 300])
def test_keys_all_alike(config: IndexConfig, count: int) -> None:
    keys, queries = torch.full((count, 3), 7.0), torch.tensor([[7.0, 7, 7], [7, 8, 9]])
    distance, rows = build(keys, config).search(queries, 1)
    assert distance.flatten().tolist() == pytest.approx([0, 5], rel=1e-5)
    check_form(distance, rows, (2, 1))


@pytest.mark.parametrize("size", [1e4, 1e15, 1e30, 1e-15, 1e-30])
@pytest.mark.parametrize("config", ALL, ids=name)
def test_large_and_small_keys(size: float, config: IndexConfig) -> None:
    """As for keys of size one, whatever the size: past fp32 the distance is inf, the row right."""
    keys, queries = 2 + torch.randn(300, 24), 2 + torch.randn(20, 24)
    factor = 2.0 ** round(math.log2(size))
    distance, rows = build(keys, config).search(queries, 4)
    scaled_distance, scaled_rows = build(keys * factor, config).search(queries * factor, 4)
    assert torch.equal(scaled_rows, rows)
    torch.testing.assert_close(scaled_distance, distance * factor * factor, rtol=1e-5, atol=0)


@pytest.mark.parametrize("config", ALL, ids=name)
def test_keys_too_small_to_scale_up(config: IndexConfig) -> None:
    keys = torch.randn(30, 24) * 1e-42
    assert build(keys, config).search(keys, 4)[0].eq(0).all()


def test_keys_that_fp16_cannot_hold() -> None:
    keys, queries = (1e6 * torch.randn(count, 16).bfloat16() for count in (100, 10))
    check_flat(keys, queries, 5)
    check_exact(RERANK, keys, queries, 25)


@pytest.mark.parametrize("noise", [1.0, 0.01])
def test_a_large_common_offset_does_not_cancel(noise: float) -> None:
    keys, queries = (1e3 + noise * torch.randn(count, 64) for count in (300, 20))
    check_flat(keys, queries, 4)


def test_one_large_coordinate_does_not_hide_the_others() -> None:
    keys, queries = torch.randn(200, 32), torch.randn(20, 32)
    keys[:, 5] += 2000
    queries[:, 5] += 2000
    keys[0, 5] *= -1  # not a matter of the centre only
    nearest = all_distances(queries, keys).sort(dim=-1).indices[:, :4]
    assert recall(build(keys, FLAT).search(queries, 4)[1], nearest) > 0.95


def test_keys_in_lists_not_probed_are_missing() -> None:
    config = IndexConfig(kind="ivfpq", probes=1)
    distance, rows = build(torch.randn(400, 16), config).search(torch.randn(5, 16), 400)
    missing = distance.isinf()
    assert missing.any(dim=-1).all()
    assert not missing[:, 0].any()
    assert rows[missing].eq(0).all()
    assert all(
        len(set(row[~gone].tolist())) == (~gone).sum()
        for row, gone in zip(rows, missing, strict=True)
    )


def test_more_probes_find_more() -> None:
    keys, queries = torch.randn(2000, 16), torch.randn(50, 16)
    expected = ExactIndex(keys).search(queries, 5)[1]
    tensors = build(keys, IndexConfig(kind="ivfpq", rerank=True, dims=16)).tensors()
    found = []
    for probes in (1, 4, 1000):
        config = IndexConfig(kind="ivfpq", probes=probes, rerank=True)
        found.append(recall(FaissIndex.load(tensors, config, CPU).search(queries, 5)[1], expected))
    assert found == sorted(set(found))


@pytest.mark.parametrize("config", ALL, ids=name)
def test_a_query_that_is_not_finite_finds_nothing(config: IndexConfig) -> None:
    queries = torch.randn(3, 8)
    queries[0, 2], queries[1, 5] = math.nan, math.inf
    distance, rows = build(torch.randn(50, 8), config).search(queries, 2)
    assert distance.isinf().tolist() == [[True] * 2, [True] * 2, [False] * 2]
    assert rows[:2].eq(0).all()


@pytest.mark.parametrize("config", ALL, ids=name)
@pytest.mark.parametrize("count", [1, 60, 1000])
def test_saved_and_loaded_it_finds_the_same(config: IndexConfig, count: int) -> None:
    keys, queries = torch.randn(count, 40).bfloat16(), torch.randn(30, 40).bfloat16()
    index = build(keys, config)
    tensors = {key: part.clone() for key, part in index.tensors().items()}
    loaded = FaissIndex.load(tensors, config, CPU)
    for before, after in zip(index.search(queries, 1), loaded.search(queries, 1), strict=True):
        assert torch.equal(before, after)
    assert ("keys" in tensors) == config.rerank
    assert ("correction" in tensors) == (config.kind == "ivfpq")
    assert tensors["faiss"].dtype == torch.uint8
    assert all(torch.equal(part, tensors[key]) for key, part in loaded.tensors().items())


@pytest.mark.parametrize("config", ALL, ids=name)
def test_an_index_is_the_same_every_time(config: IndexConfig) -> None:
    keys = torch.randn(700, 24)
    torch.manual_seed(1)
    first = build(keys, config).tensors()
    torch.manual_seed(2)
    second = build(keys, config).tensors()
    assert first.keys() == second.keys()
    assert all(torch.equal(part, second[key]) for key, part in first.items())


def test_ivfpq_is_much_smaller_than_its_keys() -> None:
    keys = torch.randn(4000, 128).bfloat16()
    flat, ivfpq = (
        sum(part.nbytes for part in build(keys, config).tensors().values())
        for config in (FLAT, IVFPQ)
    )
    assert flat == pytest.approx(keys.nbytes, rel=0.01)
    assert ivfpq < keys.nbytes / 5
