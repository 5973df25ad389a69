"""FAISS's indexes against brute force in float64, and in a running program."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helpers.points import DTYPES, clustered, share_found, split, squared_distances
from knn_moe.config import IndexConfig
from knn_moe.errors import MemoryFormatError, MissingDependencyError
from knn_moe.index import ExactIndex
from knn_moe.index import faiss as module
from knn_moe.index.faiss import FaissIndex

faiss = pytest.importorskip("faiss")

CPU = torch.device("cpu")
SHAPES = [  # keys, queries, width, k, dtype
    (1, 5, 1, 1, torch.float32),
    (5, 0, 3, 2, torch.bfloat16),
    (33, 17, 13, 5, torch.float16),
    (101, 9, 64, 101, torch.bfloat16),
    (257, 31, 2, 3, torch.float32),
]
FLAT = IndexConfig(kind="faiss-flat")
IVFPQ = IndexConfig(kind="ivfpq")
RERANK = IndexConfig(kind="ivfpq", rerank=True)


def name(config: IndexConfig) -> str:
    return f"{config.kind}{'+rerank' * config.rerank}"


every_index = pytest.mark.parametrize("config", [FLAT, IVFPQ, RERANK], ids=name)
every_shape = pytest.mark.parametrize(("keys", "queries", "width", "k", "dtype"), SHAPES)


@pytest.fixture(autouse=True)
def _silent(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert capfd.readouterr() == ("", "")


def build(keys: Tensor, config: IndexConfig) -> FaissIndex:
    return FaissIndex.build(keys, config, CPU)


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
    everything = squared_distances(queries, keys)
    extent = squared_distances(keys.double().mean(dim=0, keepdim=True), keys).max().sqrt().item()
    close = {"rtol": 1e-5, "atol": extent / 2**11 + 1e-30}
    for expected in (everything.sort(dim=-1).values[:, :k], everything.gather(1, rows)):
        torch.testing.assert_close(distance.double().sqrt(), expected.sqrt(), **close)


def check_exact(
    config: IndexConfig, keys: Tensor, queries: Tensor, k: int, rtol: float = 1e-5
) -> None:
    distance, rows = build(keys, config).search(queries, k)
    check_form(distance, rows, (len(queries), k))
    everything = squared_distances(queries, keys)
    expected = everything.sort(dim=-1).values[:, :k]
    torch.testing.assert_close(distance.double(), expected, rtol=rtol, atol=0)
    torch.testing.assert_close(everything.gather(1, rows), expected, rtol=rtol, atol=0)


@every_shape
def test_flat_finds_the_nearest_to_fp16(
    keys: int, queries: int, width: int, k: int, dtype: torch.dtype
) -> None:
    check_flat(torch.randn(keys, width).to(dtype), torch.randn(queries, width).to(dtype), k)


@every_shape
def test_reranked_distances_are_exact(
    keys: int, queries: int, width: int, k: int, dtype: torch.dtype
) -> None:
    stored, asked = torch.randn(keys, width).to(dtype), torch.randn(queries, width).to(dtype)
    distance, rows = build(stored, RERANK).search(asked, k)
    check_form(distance, rows, (queries, k))
    found = squared_distances(asked, stored).gather(1, rows)
    torch.testing.assert_close(distance.double(), found, rtol=1e-5, atol=0)
    if 4 * k + 16 >= keys:  # every key was a candidate
        check_exact(RERANK, stored, asked, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_up_to_256_keys_in_all_their_dimensions_are_quantised_without_loss(
    dtype: torch.dtype,
) -> None:
    """Each key has a code of its own: what is left is projection and rounding."""
    keys, queries = ((20 + torch.randn(count, 12)).to(dtype) for count in (200, 30))
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
    near = squared_distances(asked @ axes, centred @ axes)
    dropped = [(x - x @ axes @ axes.T).square().sum(dim=-1) for x in (asked, centred)]
    assert share_found(index.search(queries, 5)[1], near.sort(dim=-1).indices[:, :5]) > 0.99
    norms = dropped[0][:, None].sqrt(), dropped[1].sqrt()
    expected = near + (norms[0] - norms[1]).square() + 2 * (1 - alike) * norms[0] * norms[1]
    expected -= nearer * near + surplus / tensors["scale"].item() ** 2
    torch.testing.assert_close(distance.double(), expected.gather(1, rows), rtol=1e-3, atol=0)
    assert distance.mean().item() == pytest.approx(
        squared_distances(queries, keys).mean().item(), rel=0.1
    )


def test_the_projection_keeps_what_varies_most() -> None:
    keys = torch.randn(300, 16)
    keys[:, [2, 11]] *= 10
    axes = build(keys, IVFPQ).tensors()["projection"]
    assert axes[[2, 11]].square().sum().item() == pytest.approx(2, abs=0.02)


@pytest.mark.slow
def test_most_neighbours_are_found_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = split((100 + 10 * clustered(4000, 128, clusters=200)).bfloat16())
    expected = ExactIndex(keys).search(queries, 10)[1]
    monkeypatch.setattr(module, "_SAMPLE", 3000)
    index = build(keys, IndexConfig(kind="ivfpq", dims=32, rerank=True))
    assert share_found(index.search(queries, 10)[1], expected) > 0.9
    assert share_found(index.search(queries, 1)[1], expected[:, :1]) > 0.9
    plain = FaissIndex.load(index.tensors(), IndexConfig(kind="ivfpq", dims=32), CPU)
    assert share_found(plain.search(queries, 10)[1], expected) > 0.6
    assert share_found(build(keys, FLAT).search(queries, 10)[1], expected) > 0.98


@pytest.mark.slow
def test_distances_are_right_on_average() -> None:
    """Neighbours are alike in what the projection drops; without the correction they seem far."""
    keys, queries = split(1e3 + clustered(4000, 128, clusters=200, noise=0.5), queries=200)
    index = build(keys, IVFPQ)
    tensors = index.tensors()
    distance, rows = index.search(queries, 16)
    check_form(distance, rows, (200, 16))
    true = squared_distances(queries, keys).gather(1, rows)
    assert distance.mean().item() == pytest.approx(true.mean().item(), rel=0.15)
    assert (distance / true).mean().item() == pytest.approx(1, abs=0.2)
    uncorrected = {**tensors, "correction": torch.zeros(4)}
    before, same_rows = FaissIndex.load(uncorrected, IVFPQ, CPU).search(queries, 16)
    assert before.mean() > 1.5 * true.mean()
    assert torch.equal(rows.sort(dim=-1).values, same_rows.sort(dim=-1).values)
    assert torch.equal(FaissIndex.load(tensors, IVFPQ, CPU).search(queries, 16)[0], distance)


def test_a_query_too_far_off_for_fp32_is_infinitely_far() -> None:
    keys, queries = torch.zeros(300, 16), torch.zeros(1, 16)
    keys[:, :2] = torch.randn(300, 2)
    queries[0, 5] = 1e25
    assert build(keys, IVFPQ).search(queries, 2)[0].isposinf().all()


@every_index
def test_every_duplicate_is_found(config: IndexConfig) -> None:
    keys = torch.randn(20, 6).repeat(40, 1)
    distance, rows = build(keys, config).search(keys[:20], 40)
    assert (rows.sort(dim=-1).values % 20 == torch.arange(20)[:, None]).all()
    check_form(distance, rows, (20, 40))


@pytest.mark.parametrize("config", [FLAT, RERANK], ids=name)
def test_ties_are_different_keys_at_one_distance(config: IndexConfig) -> None:
    keys = torch.cat([torch.eye(6), -torch.eye(6)])
    check_exact(config, keys, torch.zeros(1, 6), 5)


@every_index
@pytest.mark.parametrize("count", [1, 8, 300])
def test_keys_all_alike(config: IndexConfig, count: int) -> None:
    keys, queries = torch.full((count, 3), 7.0), torch.tensor([[7.0, 7, 7], [7, 8, 9]])
    distance, rows = build(keys, config).search(queries, 1)
    assert distance.flatten().tolist() == pytest.approx([0, 5], rel=1e-5)
    check_form(distance, rows, (2, 1))


@every_index
@pytest.mark.parametrize("size", [1e6, 1e30, 1e-30])
def test_large_and_small_keys(size: float, config: IndexConfig) -> None:
    """As for keys of size one, whatever the size: past fp32 the distance is inf, the row right."""
    keys, queries = 2 + torch.randn(300, 24), 2 + torch.randn(20, 24)
    factor = 2.0 ** round(math.log2(size))
    distance, rows = build(keys, config).search(queries, 4)
    scaled_distance, scaled_rows = build(keys * factor, config).search(queries * factor, 4)
    assert torch.equal(scaled_rows, rows)
    torch.testing.assert_close(scaled_distance, distance * factor * factor, rtol=1e-5, atol=0)


@every_index
def test_keys_too_small_to_scale_up(config: IndexConfig) -> None:
    keys = torch.randn(30, 24) * 1e-42
    assert build(keys, config).search(keys, 4)[0].eq(0).all()


def test_a_large_common_offset_does_not_cancel() -> None:
    keys, queries = (1e3 + 0.01 * torch.randn(count, 64) for count in (300, 20))
    check_flat(keys, queries, 4)


def test_one_large_coordinate_does_not_hide_the_others() -> None:
    keys, queries = torch.randn(200, 32), torch.randn(20, 32)
    keys[:, 5] += 2000
    queries[:, 5] += 2000
    keys[0, 5] *= -1  # not a matter of the centre only
    nearest = squared_distances(queries, keys).sort(dim=-1).indices[:, :4]
    assert share_found(build(keys, FLAT).search(queries, 4)[1], nearest) > 0.95


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
    keys, queries = torch.randn(1000, 16), torch.randn(50, 16)
    expected = ExactIndex(keys).search(queries, 5)[1]
    tensors = build(keys, IndexConfig(kind="ivfpq", rerank=True, dims=16)).tensors()
    found = []
    for probes in (1, 4, 1000):
        config = IndexConfig(kind="ivfpq", probes=probes, rerank=True)
        rows = FaissIndex.load(tensors, config, CPU).search(queries, 5)[1]
        found.append(share_found(rows, expected))
    assert found == sorted(set(found))


@every_index
def test_a_query_that_is_not_finite_finds_nothing(config: IndexConfig) -> None:
    queries = torch.randn(3, 8)
    queries[0, 2], queries[1, 5] = math.nan, math.inf
    distance, rows = build(torch.randn(50, 8), config).search(queries, 2)
    assert distance.isinf().tolist() == [[True] * 2, [True] * 2, [False] * 2]
    assert rows[:2].eq(0).all()


@every_index
@pytest.mark.parametrize("count", [1, 500])
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


@every_index
def test_an_index_is_the_same_every_time(config: IndexConfig) -> None:
    keys = torch.randn(700, 24)
    torch.manual_seed(1)
    first = build(keys, config).tensors()
    torch.manual_seed(2)
    second = build(keys, config).tensors()
    assert first.keys() == second.keys()
    assert all(torch.equal(part, second[key]) for key, part in first.items())


def test_ivfpq_is_much_smaller_than_its_keys() -> None:
    keys = torch.randn(2000, 128).bfloat16()
    flat, ivfpq = (
        sum(part.nbytes for part in build(keys, config).tensors().values())
        for config in (FLAT, IVFPQ)
    )
    assert flat == pytest.approx(keys.nbytes, rel=0.01)
    assert ivfpq < keys.nbytes / 5


# In a running program


def test_few_queries_have_few_threads_and_their_number_is_restored() -> None:
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


@pytest.mark.usefixtures("compiled_state")
def test_a_compiled_model_can_search() -> None:
    layers = [build(torch.randn(50, 2), config) for config in (FLAT, IVFPQ, RERANK) * 3]

    def model(x: Tensor) -> Tensor:
        for index in layers:
            distance, rows = index.search(x * 1, 2)
            x = x + distance + rows
        return x

    compiled = torch.compile(model, backend="eager")
    for count in (4, 5, 1):
        queries = torch.randn(count, 2, requires_grad=True)
        assert torch.equal(compiled(queries), model(queries))


@pytest.mark.slow
def test_importing_it_does_not_import_the_compiler() -> None:
    check = "import sys, knn_moe.index.faiss; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@every_index
def test_gradients_and_autocast_change_nothing(config: IndexConfig) -> None:
    index, queries = build(torch.randn(300, 24), config), torch.randn(20, 24)
    expected = index.search(queries, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = index.search(queries.requires_grad_(), 3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not found[0].requires_grad


@pytest.mark.parametrize("config", [FLAT, IVFPQ], ids=name)
def test_without_faiss_the_error_says_how_to_install_it(
    config: IndexConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = build(torch.randn(5, 4), config).tensors()
    monkeypatch.setitem(sys.modules, "faiss", None)
    reloaded = runpy.run_path(str(module.__file__))["FaissIndex"]  # importing needs no faiss
    message = rf"'{config.kind}' needs FAISS, .*: pip install faiss-cpu$"
    with pytest.raises(MissingDependencyError, match=message):
        reloaded.build(torch.randn(5, 4), config, CPU)
    with pytest.raises(MissingDependencyError, match=message):
        reloaded.load(tensors, config, CPU)


def test_a_damaged_index_says_so() -> None:
    tensors = build(torch.randn(30, 8), RERANK).tensors()
    with pytest.raises(MemoryFormatError, match=r"damaged .*Build it again"):
        FaissIndex.load({**tensors, "faiss": tensors["faiss"][:100]}, RERANK, CPU)
    del tensors["keys"], tensors["correction"]
    with pytest.raises(MemoryFormatError, match=r"lacks correction, keys\. Build it again"):
        FaissIndex.load(tensors, RERANK, CPU)
