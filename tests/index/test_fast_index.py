"""`fast` against exact search, and against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.points import DTYPES, clustered, split, squared_distances
from knn_moe.errors import ConfigError
from knn_moe.index import ExactIndex, FastIndex, IndexConfig, load_index
from knn_moe.index.fast import index as module
from knn_moe.index.fast.scan import BINS, decode_codes

CPU = torch.device("cpu")
every_bits = pytest.mark.parametrize("bits", [4, 8])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def build(keys: Tensor, **options: object) -> FastIndex:
    return FastIndex.build(keys, IndexConfig(kind="fast", **options))


def rows(index: FastIndex, places: Tensor) -> Tensor:
    return index.rows[places].long()


def recall_at_1(index: FastIndex, keys: Tensor, queries: Tensor) -> float:
    """Return how often a nearest key comes first; of equally near keys any will do."""
    _, places = index.search(queries, 1)
    distance = squared_distances(queries, keys)
    found = distance.gather(1, rows(index, places)).squeeze(1)
    return (found <= distance.amin(dim=-1)).float().mean().item()


def relative_error(index: FastIndex, keys: Tensor, queries: Tensor, k: int = 4) -> Tensor:
    """Return the relative errors of the squared distances to the keys found."""
    squared, places = index.search(queries, k)
    true = squared_distances(queries, keys).gather(1, rows(index, places))
    return ((squared - true) / true).abs()


def check_form(distance: Tensor, places: Tensor, shape: tuple[int, int]) -> None:
    """As KeyIndex says: nearest first, no key twice, and after the last one found: inf, place 0."""
    assert distance.shape == places.shape == shape
    assert (distance.dtype, places.dtype) == (torch.float32, torch.int64)
    assert not distance.isnan().any()
    assert (distance >= 0).all()
    assert places[distance.isinf()].eq(0).all()
    for row, found in zip(places.tolist(), (~distance.isinf()).tolist(), strict=True):
        assert found == sorted(found, reverse=True)
        kept = [place for place, there in zip(row, found, strict=True) if there]
        assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("rerank", [False, True])
@pytest.mark.parametrize(
    ("keys", "queries", "width", "k", "bits", "dtype"),
    [
        (1, 5, 1, 1, 4, torch.float32),
        (5, 0, 3, 2, 8, torch.float16),
        (7, 1, 5, 7, 8, torch.bfloat16),
        (33, 17, 13, 5, 8, torch.float32),
        (101, 9, 65, 101, 4, torch.float16),
    ],
)
def test_small_indexes_of_any_shape(
    keys: int, queries: int, width: int, k: int, bits: int, dtype: torch.dtype, rerank: bool
) -> None:
    index = build(torch.randn(keys, width).to(dtype), bits=bits, rerank=rerank)
    distance, places = index.search(torch.randn(queries, width).to(dtype), k)
    check_form(distance, places, (queries, k))
    assert distance.isfinite().all()  # one list, no more than BINS keys
    if k == keys:
        assert torch.equal(places.sort().values, torch.arange(keys).expand(queries, -1))


@pytest.mark.parametrize(
    ("width", "dtype"), [(64, torch.float16), (129, torch.bfloat16), (250, torch.float32)]
)
def test_all_lists_at_eight_bits_find_what_exact_search_finds(
    width: int, dtype: torch.dtype
) -> None:
    keys, queries = split(clustered(2100, width).to(dtype))
    index = build(keys, bits=8, probes=1000, dims=256)
    assert index.probes == len(index.centres) > 3
    assert recall_at_1(index, keys, queries) >= 0.92
    error = relative_error(index, keys, queries)
    assert error.median() < 0.02
    assert error.quantile(0.95) < 0.06
    exact, _ = ExactIndex(keys).search(queries, 4)
    distance, _ = index.search(queries, 4)
    assert ((distance - exact) / exact).abs().quantile(0.9) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "dims", "dtype"),
    [(64, None, torch.float32), (300, None, torch.bfloat16), (300, 128, torch.float16)],
)
def test_default_options_find_near_keys(width: int, dims: int | None, dtype: torch.dtype) -> None:
    """Four bits a coordinate often take the second for the first, but nothing far for near."""
    keys, queries = split(clustered(3100, width).to(dtype))
    index = build(keys, dims=dims)
    assert recall_at_1(index, keys, queries) >= 0.55
    distance = squared_distances(queries, keys).sqrt()
    _, places = index.search(queries, 8)
    found = distance.gather(1, rows(index, places))
    least = distance.amin(dim=-1)
    assert (found.amin(dim=-1) == least).float().mean() >= 0.9
    assert (found[:, 0] / least).quantile(0.95) < 1.2
    assert relative_error(index, keys, queries).median() < 0.08


@every_bits
def test_recall_of_keys_without_clusters(bits: int) -> None:
    keys, queries = split(torch.randn(2100, 64) * torch.arange(1, 65) ** -0.5)
    assert recall_at_1(build(keys, bits=bits), keys, queries) >= {4: 0.6, 8: 0.9}[bits]


@every_dtype
def test_ranking_again_gives_exact_distances(dtype: torch.dtype) -> None:
    keys, queries = split(clustered(1500, 70).to(dtype))
    index = build(keys, rerank=True)
    assert index.keys is not None
    assert torch.equal(index.keys, keys[index.rows.long()])
    distance, places = index.search(queries, 4)
    check_form(distance, places, (100, 4))
    assert (distance.diff(dim=-1) >= 0).all()
    exact = squared_distances(queries, keys).gather(1, rows(index, places))
    torch.testing.assert_close(distance.double(), exact, rtol=1e-5, atol=0)
    assert recall_at_1(index, keys, queries) >= 0.9


def test_more_probes_find_no_less() -> None:
    keys, queries = split(torch.randn(3100, 24))
    index = build(keys, bits=8, probes=99)
    found = []
    for probes in (1, 4, len(index.centres)):
        index.probes = probes
        found.append(recall_at_1(index, keys, queries))
    assert found == sorted(found)
    assert found[0] < found[-1]


@pytest.mark.parametrize("rerank", [False, True])
def test_all_keys_are_wanted(rerank: bool) -> None:
    """Of keys a bin apart one is kept: at most BINS of a list are found, the rest is missing."""
    keys = clustered(700, 20)
    index = build(keys, rerank=rerank)
    findable = index.begin.diff().clamp(max=BINS).sum()
    distance, places = index.search(keys[:12], 700)
    check_form(distance, places, (12, 700))
    assert (distance.isfinite().sum(dim=-1) == findable).all()
    assert findable < 700


@every_bits
def test_duplicates_are_all_found(bits: int) -> None:
    keys = torch.randn(25, 6).repeat(3, 1)
    index = build(keys, bits=bits)
    distance, places = index.search(keys[:25], 3)
    check_form(distance, places, (25, 3))
    assert (rows(index, places) % 25 == torch.arange(25)[:, None]).float().mean() > 0.9
    assert (distance == distance[:, :1]).all() or bits == 4


@every_bits
def test_a_key_that_is_stored_thousands_of_times(bits: int) -> None:
    keys = torch.cat([torch.randn(1000, 32), torch.ones(2000, 32)]).bfloat16()
    index = build(keys, bits=bits)
    distance, places = index.search(torch.ones(2, 32, dtype=torch.bfloat16), 40)
    check_form(distance, places, (2, 40))
    assert (rows(index, places) >= 1000).all()
    assert (distance < 0.05 * 64).all()  # 64: the squared distance of two random keys


@every_bits
def test_a_third_of_the_keys_are_equal(bits: int) -> None:
    others, queries = split(clustered(1100, 40))
    keys = torch.cat([others, torch.zeros(500, 40)])
    without, index = build(others, bits=bits), build(keys, bits=bits)
    assert recall_at_1(index, keys, queries) > recall_at_1(without, others, queries) - 0.15
    assert relative_error(index, keys, queries).median() < 0.1


@every_bits
def test_ties_go_to_the_first_place(bits: int) -> None:
    keys = torch.cat([torch.eye(16), -torch.eye(16)]).repeat(2, 1)
    _, places = build(torch.ones(50, 16), bits=bits).search(torch.ones(3, 16), 5)
    assert places.tolist() == [list(range(5))] * 3
    distance, places = build(keys, bits=bits).search(torch.zeros(1, 16), 64)
    check_form(distance, places, (1, 64))
    for value in distance.unique():
        tied = places[distance == value]
        assert torch.equal(tied, tied.sort().values)


@pytest.mark.parametrize(("scale", "bits"), [(1e-6, 8), (1e15, 4)])
def test_the_size_of_the_keys_does_not_matter(scale: float, bits: int) -> None:
    keys, queries = split(clustered(1100, 48))
    plain, index = build(keys, bits=bits), build(scale * keys, bits=bits)
    _, expected = plain.search(queries, 4)
    distance, places = index.search(scale * queries, 4)
    check_form(distance, places, (100, 4))
    assert (rows(index, places) == rows(plain, expected)).float().mean() > 0.95
    assert relative_error(index, scale * keys, scale * queries).median() < 0.1


def test_huge_keys_in_half_precision() -> None:
    keys, queries = split(clustered(1100, 48).clamp(-6, 6).mul(1e4).half())
    assert keys.isfinite().all()
    index = build(keys, bits=8)
    assert recall_at_1(index, keys, queries) >= 0.9
    assert relative_error(index, keys, queries).median() < 0.1


@every_dtype
def test_a_large_common_offset_does_not_cancel(dtype: torch.dtype) -> None:
    offset = -1e3 if dtype == torch.float32 else 1e2
    keys, queries = split((offset + 10 * clustered(1100, 48)).to(dtype))
    index = build(keys, bits=8)
    assert recall_at_1(index, keys, queries) >= 0.8
    assert relative_error(index, keys, queries).median() < 0.1


@pytest.mark.parametrize(("larger", "bits"), [(10, 8), (1e4, 4)])
def test_one_huge_key_among_others_spoils_nothing(larger: float, bits: int) -> None:
    keys, queries = split(clustered(1100, 48))
    plain = recall_at_1(build(keys, bits=bits), keys, queries)
    keys[77] *= larger
    index = build(keys, bits=bits)
    assert recall_at_1(index, keys, queries) > plain - 0.15
    assert relative_error(index, keys, queries).median() < 0.1


@pytest.mark.parametrize(("larger", "bits"), [(10, 4), (30, 8)])
def test_a_query_on_the_way_to_huge_keys_is_near_to_none(larger: float, bits: int) -> None:
    """λ would be 1 if what a huge key cannot hold were subtracted from its distance."""
    keys, queries = split(clustered(1100, 512))
    keys[:50] = larger * keys[0] + 0.1 * torch.randn(50, 512)
    index = build(keys, bits=bits)
    near, _ = index.search(queries, 1)
    between = torch.tensor([[0.25], [0.5], [0.75]]) * keys[0]
    distance, _ = index.search(between, 1)
    assert (squared_distances(between, keys).amin(dim=-1) > 4 * near.median()).all()
    assert (distance.squeeze(1) > 2 * near.median()).all()


@every_dtype
@pytest.mark.parametrize(("value", "bits"), [(0.0, 4), (0.1, 8), (7.0, 4)])
def test_an_index_of_equal_keys(value: float, bits: int, dtype: torch.dtype) -> None:
    keys = torch.full((600, 9), value, dtype=dtype)
    index = build(keys, bits=bits)
    distance, places = index.search(keys[:2], 3)
    check_form(distance, places, (2, 3))
    assert (distance < 1e-3).all()
    far, _ = index.search(keys[:2] + 100, 1)
    assert (far > 0.4 * 9 * 1e4).all()


@pytest.mark.parametrize(
    ("width", "bits", "rerank"), [(48, 4, False), (300, 8, False), (48, 8, True)]
)
def test_a_query_far_from_everything_is_far(width: int, bits: int, rerank: bool) -> None:
    """A query beyond the grid's edge may seem nearer than it is, by half; λ is 0 all the same."""
    keys, queries = split(clustered(1100, width))
    index = build(keys, bits=bits, rerank=rerank, dims=128 if width > 128 else None)
    near, _ = index.search(queries, 4)
    for far in (1e2, 1e4, 1e15):
        distance, places = index.search(far * torch.randn(5, width), 4)
        check_form(distance, places, (5, 4))
        assert (distance > 0.4 * far**2 * width).all()
        assert torch.exp(-distance / near.median()).eq(0).all()


def test_a_query_that_is_not_a_number_does_not_affect_others() -> None:
    keys, queries = split(clustered(1100, 48), queries=20)
    index = build(keys)
    expected = index.search(queries, 3)
    queries[4] = float("nan")
    others = torch.arange(20) != 4
    for found, wanted in zip(index.search(queries, 3), expected, strict=True):
        assert torch.equal(found[others], wanted[others])


@pytest.mark.parametrize(("bits", "rerank"), [(4, True), (8, False)])
def test_an_index_restored_from_its_tensors_finds_the_same(bits: int, rerank: bool) -> None:
    config = IndexConfig(kind="fast", bits=bits, rerank=rerank, probes=2)
    keys, queries = split(clustered(1100, 33))
    index = FastIndex.build(keys, config)
    tensors = index.tensors()
    assert ("keys" in tensors) is rerank
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    restored = load_index({name: tensor.clone() for name, tensor in tensors.items()}, config, CPU)
    for found, expected in zip(restored.search(queries, 3), index.search(queries, 3), strict=True):
        assert torch.equal(found, expected)


@every_bits
def test_a_cpu_scans_bytes(bits: int) -> None:
    """Four-bit codes are unpacked once, and stored packed."""
    index = build(torch.randn(100, 10), bits=bits)
    assert index.scanned.dtype == torch.int8
    assert torch.equal(index.scanned.float(), decode_codes(index.codes))
    assert "scanned" not in index.tensors()
    assert index.codes.shape == (100, 64 * bits // 8)


def test_building_twice_gives_the_same_index() -> None:
    keys = clustered(1500, 40)
    one, other = build(keys).tensors(), build(keys).tensors()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = clustered(900, 40)
    at_once = build(keys).tensors()
    monkeypatch.setattr(module, "_BLOCK", 128)
    in_blocks = build(keys).tensors()
    assert torch.equal(in_blocks["rows"].sort().values, torch.arange(900).int())
    same = (in_blocks["codes"] == at_once["codes"]).float().mean()
    assert same > 0.99  # a product in parts may be rounded differently


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "rerank"), [("eager", True), ("aot_eager", False)])
@pytest.mark.usefixtures("compiled_state")
def test_compiled_search_finds_the_same(backend: str, rerank: bool) -> None:
    keys, queries = split(clustered(700, 33), queries=30)
    index = build(keys, rerank=rerank)
    search = torch.compile(
        lambda queries: index.search(queries, 3), backend=backend, fullgraph=True
    )
    for count in (1, 30):
        found, expected = search(queries[:count]), index.search(queries[:count], 3)
        assert torch.equal(found[1], expected[1])
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)


def test_kernels_replace_the_estimates() -> None:
    index = build(torch.randn(200, 8))
    calls: list[tuple[int, int]] = []

    def kernel_search(queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        calls.append((len(queries), k))
        return torch.zeros(len(queries), k), torch.zeros(len(queries), k, dtype=torch.int64)

    index.kernel_search = kernel_search
    index.search(torch.randn(3, 8), 5)
    index.search(torch.randn(3, 8), module.MOST_FOUND + 1)
    assert calls == [(3, 5)]


def test_an_index_is_no_part_of_a_state_dict() -> None:
    assert not build(torch.randn(4, 2), rerank=True).state_dict()


@pytest.mark.parametrize(
    ("width", "dims"),
    [(1, 64), (64, 64), (65, 128), (256, 256), (2047, 256), (4096, 512), (4097, 512)],
)
def test_dims_follow_the_width(width: int, dims: int) -> None:
    assert module.default_dims(width) == dims


def test_dims_are_a_multiple_of_what_kernels_read() -> None:
    assert build(torch.randn(90, 10), dims=128).codes.shape == (90, 64)
    with pytest.raises(ConfigError, match="multiple of 64, got 100"):
        IndexConfig(kind="fast", dims=100)
