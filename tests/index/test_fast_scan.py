"""Both ways in which `fast` scans its lists, against brute force."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.points import squared_distances
from knn_moe.index.fast import scan
from knn_moe.index.fast.grid import FARTHEST, LARGEST, from_codes
from knn_moe.index.fast.packing import pack, unpack
from knn_moe.index.fast.scan import BINS, NOT_FOUND, PLACE_BITS, Lists

every_bits = pytest.mark.parametrize("bits", [4, 8])
Scan = Callable[[Lists, Tensor, Tensor, int], Tensor]


def make_lists(sizes: list[int], dims: int, bits: int, spread: int) -> Lists:
    """Make lists of random codes; a small spread gives many ties."""
    count = sum(sizes)
    lowest, highest = (-8, 7) if bits == 4 else (-127, 127)
    codes = torch.randint(max(-spread, lowest), min(spread, highest) + 1, (count, dims))
    dropped = torch.randint(0, 4 * spread, (count,))
    norms = from_codes(codes, bits).square().sum(dim=-1) + dropped
    centres = torch.randint(-2, 3, (len(sizes), dims)).to(torch.int8)
    return Lists(
        codes=pack(codes, bits),
        norms=norms.clamp(max=FARTHEST).int(),
        centres=centres,
        centre_norms=centres.float().square().sum(dim=-1),
        begin=torch.tensor([0, *sizes]).cumsum(0).int(),
    )


def brute_force(lists: Lists, points: Tensor, probes: int, k: int) -> Tensor:
    """Do what the docstring of `scan` says, query by query and key by key."""
    codes = from_codes(unpack(lists.codes), 4 if lists.codes.dtype == torch.uint8 else 8).double()
    estimates = points.double().square().sum(dim=-1, keepdim=True) + lists.norms.double()
    estimates = (estimates - 2 * points.double() @ codes.T).clamp(0, FARTHEST).long()
    distance = squared_distances(points, lists.centres).round().long()
    begin, results = lists.begin.tolist(), []
    for query, near in enumerate(distance.tolist()):
        kept = []
        for number in sorted(range(len(near)), key=lambda number: (near[number], number))[:probes]:
            bins: dict[int, tuple[int, int]] = {}
            for place in range(begin[number], begin[number + 1]):
                candidate = (int(estimates[query, place]), place)
                bin_number = (place - begin[number]) % BINS
                bins[bin_number] = min(bins.get(bin_number, candidate), candidate)
            kept.extend(bins.values())
        best = [(estimate << PLACE_BITS) + place for estimate, place in sorted(kept)[:k]]
        results.append(best + [NOT_FOUND] * (k - len(best)))
    return torch.tensor(results, dtype=torch.int64).view(len(points), k)


every_way = pytest.mark.parametrize(
    "way",
    [pytest.param(scan._scan_each, id="each"), pytest.param(scan._scan_grouped, id="grouped")],
)


@every_way
@every_bits
@pytest.mark.parametrize(
    ("sizes", "dims", "queries", "probes", "k", "spread"),
    [
        ([1], 64, 1, 1, 1, 3),
        ([5], 64, 3, 1, 8, 1),
        ([1, 127, 128, 129, 256, 257], 64, 5, 6, 16, 2),
        ([512, 511, 40], 128, 3, 2, 128, 40),
        ([200, 300, 100, 7], 192, 9, 3, 1, 127),
        ([300], 64, 2, 1, 300, 5),
    ],
)
def test_every_way_to_scan_is_brute_force(
    way: Scan,
    bits: int,
    sizes: list[int],
    dims: int,
    queries: int,
    probes: int,
    k: int,
    spread: int,
) -> None:
    lists = make_lists(sizes, dims, bits, spread)
    points = torch.randint(-spread, spread + 1, (queries, dims)).clamp(-LARGEST, LARGEST).float()
    found = way(lists, points, scan.nearest_lists(lists, points, probes), k)
    assert torch.equal(found, brute_force(lists, points, probes, k))


@pytest.mark.parametrize("queries", [0, scan._ONE_BY_ONE, scan._ONE_BY_ONE + 1])
@every_bits
def test_few_queries_and_many_find_the_same(bits: int, queries: int) -> None:
    lists = make_lists([40, 200, 9], 64, bits, 4)
    points = torch.randint(-20, 21, (queries, 64)).float()
    found = scan.scan(lists, points, 2, 3)
    assert (found.shape, found.dtype) == ((queries, 3), torch.int64)
    assert torch.equal(found, brute_force(lists, points, 2, 3))


@every_way
@every_bits
def test_points_at_the_edge_of_many_dims_are_scanned_exactly(way: Scan, bits: int) -> None:
    """Where numbers are largest: every coordinate at the edge, or nearly."""
    dims = 1024
    lists = make_lists([60], dims, bits, 1)
    edge = 7 if bits == 4 else LARGEST
    codes = torch.where(torch.rand(60, dims) < 0.02, 0, edge)
    norms = from_codes(codes, bits).square().sum(dim=-1).clamp(max=FARTHEST).int()
    lists = lists._replace(codes=pack(codes, bits), norms=norms)
    points = torch.where(torch.rand(4, dims) < 0.4, 0.0, LARGEST - 6)
    found = way(lists, points, torch.zeros(4, 1, dtype=torch.int64), 5)
    assert torch.equal(found, brute_force(lists, points, 1, 5))


@every_way
def test_of_equal_keys_the_first_comes_first(way: Scan) -> None:
    lists = make_lists([10, 10], 64, 4, 3)
    lists = lists._replace(codes=lists.codes[:1].expand(20, -1).contiguous())
    lists = lists._replace(norms=lists.norms[:1].expand(20).contiguous())
    points = torch.zeros(2, 64)
    found = way(lists, points, torch.tensor([[1, 0], [0, 1]]), 12)
    assert (found & (2**PLACE_BITS - 1)).tolist() == [list(range(12))] * 2


@every_way
def test_of_keys_a_bin_apart_only_the_nearest_is_found(way: Scan) -> None:
    lists = make_lists([2 * BINS + 1], 64, 8, 1)
    codes = torch.full((2 * BINS + 1, 64), 100)
    codes[0], codes[BINS], codes[2 * BINS], codes[5] = 2, 1, 3, 4
    norms = codes.square().sum(dim=-1).int()
    lists = lists._replace(codes=pack(codes, 8), norms=norms)
    found = way(lists, torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int64), 2)
    assert (found & (2**PLACE_BITS - 1)).tolist() == [[BINS, 5]]


def test_nearest_lists_come_in_order_and_ties_by_number() -> None:
    lists = make_lists([1] * 5, 64, 4, 3)
    centres = torch.tensor([9, 1, -1, 30, 1])[:, None].expand(5, 64).to(torch.int8)
    norms = centres.float().square().sum(dim=-1)
    lists = lists._replace(centres=centres, centre_norms=norms)
    near = scan.nearest_lists(lists, torch.zeros(2, 64), 4)
    assert near.tolist() == [[1, 2, 4, 0]] * 2


def test_the_operator_for_compiled_graphs() -> None:
    lists = make_lists([40, 30], 64, 4, 4)
    for queries in (3, scan._ONE_BY_ONE + 3):
        points = torch.randint(-20, 21, (queries, 64)).float()
        torch.library.opcheck(torch.ops.knn_moe.scan, (list(lists), points, 2, 3))
