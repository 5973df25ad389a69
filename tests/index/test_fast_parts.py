"""What `fast` is made of: packing, partition, grid and values, against plain arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from helpers.points import DTYPES, clustered, squared_distances
from knn_moe.index.fast import partition
from knn_moe.index.fast.grid import (
    COARSE,
    LARGEST,
    Correction,
    Grid,
    fit_correction,
    from_codes,
    round_to_grid,
    to_codes,
)
from knn_moe.index.fast.packing import pack, unpack
from knn_moe.index.fast.values import PackedValues

every_bits = pytest.mark.parametrize("bits", [4, 8])
CLOSE = {"rtol": 1e-3, "atol": 1e-2}


# Packing


@every_bits
@pytest.mark.parametrize("shape", [(0, 2), (3, 6)])
def test_unpacking_gives_back_what_was_packed(bits: int, shape: tuple[int, int]) -> None:
    largest = 2 ** (bits - 1)
    numbers = torch.randint(-largest, largest, shape)
    packed = pack(numbers.float(), bits)
    assert packed.dtype == (torch.uint8 if bits == 4 else torch.int8)
    assert packed.shape == (shape[0], shape[1] * bits // 8)
    assert unpack(packed).dtype == torch.int8
    assert torch.equal(unpack(packed).long(), numbers)
    assert torch.equal(unpack(packed[None, :, None]).long(), numbers[None, :, None])


@every_bits
def test_every_number_can_be_packed(bits: int) -> None:
    numbers = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))[None]
    assert torch.equal(unpack(pack(numbers, bits)).long(), numbers)


def test_a_byte_holds_a_number_of_the_first_half_and_one_of_the_second() -> None:
    assert pack(torch.tensor([[-8, 0, 7, 1]]), 4).tolist() == [[0 | 15 << 4, 8 | 9 << 4]]


# Partition


def check_partition(points: Tensor) -> partition.Partition:
    """Every point in exactly one list, no list empty or too long."""
    order, begin = parts = partition.partition(points)
    assert order.sort().values.tolist() == list(range(len(points)))
    assert (begin[0], begin[-1]) == (0, len(points))
    assert begin.diff().min() >= 1
    assert begin.diff().max() <= partition.LONGEST
    return parts


@pytest.mark.parametrize("count", [1, 2, 512, 513, 768, 5000])
def test_every_point_is_in_one_list(count: int) -> None:
    check_partition(torch.randn(count, 8))


@pytest.mark.parametrize("different", [1, 3])
def test_thousands_of_duplicates_are_cut_into_lists(different: int) -> None:
    points = torch.randn(different, 5)[torch.arange(3000) % different]
    _, begin = check_partition(points)
    assert len(begin) - 1 >= -(-3000 // partition.LONGEST)


def test_a_few_points_beside_thousands_of_duplicates() -> None:
    check_partition(torch.cat([torch.randn(7, 5), torch.zeros(4000, 5), torch.randn(7, 5)]))


def test_points_on_a_line_are_cut_along_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "_TYPICAL", 10_000)
    points = torch.randn(2000, 1) * torch.tensor([[0.1, 3.0, 0.2]])
    order, begin = check_partition(points)
    along = [points[order[i:j], 1] for i, j in pairwise(begin)]
    assert len(along) == 4
    assert all(low.max() <= high.min() for low, high in pairwise(along))


def test_points_of_a_list_are_near_each_other() -> None:
    points = clustered(4000, 16, clusters=10, noise=0.1)
    order, begin = check_partition(points)
    means = partition.list_means(points[order], begin)
    within = points[order] - means.repeat_interleave(begin.diff(), dim=0)
    assert within.square().sum() < 0.2 * (points - points.mean(dim=0)).square().sum()


def test_a_partition_is_the_same_every_time() -> None:
    points = clustered(3000, 12)
    for one, other in zip(partition.partition(points), partition.partition(points), strict=True):
        assert torch.equal(one, other)


def test_means_of_lists() -> None:
    points, begin = torch.randn(9, 4), torch.tensor([0, 1, 7, 9])
    expected = torch.stack(
        [points[:1].mean(dim=0), points[1:7].mean(dim=0), points[7:].mean(dim=0)]
    )
    torch.testing.assert_close(partition.list_means(points, begin), expected)


def test_blocks_do_not_change_the_nearest_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    points, centres = torch.randn(100, 6), torch.randn(13, 6)
    monkeypatch.setattr(partition, "_BLOCK", 7)
    nearest = partition.nearest_centre(points, centres)
    assert torch.equal(nearest, squared_distances(points, centres).argmin(dim=-1))


# Grid


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "dims", "bits"), [(1, 64, 8), (33, 64, 4), (64, 64, 8), (200, 64, 4), (200, 128, 8)]
)
def test_projected_and_dropped_make_up_the_distance_from_the_centre(
    width: int, dims: int, bits: int, dtype: torch.dtype
) -> None:
    """As exactly as the projection's dtype allows; what lies beyond the edge counts twice."""
    keys = (5 + clustered(500, width)).to(dtype)
    grid = Grid.fit(keys, dims, bits)
    assert grid.projection.shape == (dims, width)
    assert grid.projection.dtype == dtype
    projected = grid.project(keys)
    dropped = grid.dropped(keys, projected)
    beyond = (projected.double().abs() - LARGEST).clamp(min=0).square().sum(dim=-1)
    whole = ((keys.double() - grid.centre) / grid.step).square().sum(dim=-1)
    sum_of_parts = projected.double().square().sum(dim=-1) + dropped - beyond
    rounding = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(sum_of_parts, whole, rtol=rounding, atol=rounding * whole.mean())
    assert (dropped >= 0).all()
    if width <= dims:
        assert (dropped - beyond <= rounding * whole.mean()).all()


@pytest.mark.parametrize(("width", "bits"), [(3, 4), (64, 8)])
def test_a_projection_onto_as_many_directions_keeps_distances(width: int, bits: int) -> None:
    keys = 100 + clustered(300, width)
    grid = Grid.fit(keys, 64, bits)
    projected = grid.project(keys)
    distance = squared_distances(projected[:20], projected).sqrt() * grid.step
    expected = squared_distances(keys[:20], keys).sqrt()
    torch.testing.assert_close(distance, expected, rtol=1e-3, atol=1e-3)


def test_the_leading_directions_are_kept() -> None:
    keys = torch.randn(2000, 100) * torch.cat([torch.ones(64), torch.full((36,), 0.01)])
    grid = Grid.fit(keys, 64, 8)
    dropped = grid.dropped(keys, grid.project(keys).clamp(-LARGEST, LARGEST))
    assert (dropped * grid.step.square()).median() < 0.01 * keys.square().sum(dim=-1).median()


@every_bits
def test_keys_lie_within_the_edge(bits: int) -> None:
    keys = 30 * torch.randn(3000, 48)
    projected = Grid.fit(keys, 64, bits).project(keys)
    assert (projected.abs() <= LARGEST).float().mean() > 0.98
    assert projected.std() > LARGEST / 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "value"), [(300, 0.0), (1, 0.1), (300, -7.0), (300, 1e4)])
def test_a_grid_of_equal_keys(count: int, value: float, dtype: torch.dtype) -> None:
    keys = torch.full((count, 10), value, dtype=dtype)
    grid = Grid.fit(keys, 64, 4)
    assert grid.step > 0
    assert all(part.isfinite().all() for part in grid)
    squared = grid.project(keys).square().sum(dim=-1) + grid.dropped(keys, grid.project(keys))
    assert (squared.sqrt() * grid.step <= 1e-5 * max(1, abs(value))).all()


def test_a_grid_is_the_same_every_time() -> None:
    keys = clustered(500, 40)
    for one, other in zip(Grid.fit(keys, 64, 4), Grid.fit(keys, 64, 4), strict=True):
        assert torch.equal(one, other)


def test_the_nearest_grid_point() -> None:
    points = torch.tensor([[-1e9, -127.4, -0.4, 0.6, 126.6, 127.6, 1e9]])
    assert round_to_grid(points).tolist() == [[-127, -127, 0, 1, 127, 127, 127]]


@every_bits
def test_a_code_stands_for_a_grid_point_nearby(bits: int) -> None:
    points = 200 * torch.randn(10, 64)
    codes = to_codes(points, bits)
    assert torch.equal(codes, codes.round())
    assert torch.equal(unpack(pack(codes, bits)).float(), codes)
    decoded = from_codes(unpack(pack(codes, bits)), bits)
    assert torch.equal(decoded, from_codes(codes, bits))
    step = COARSE if bits == 4 else 1
    edge = LARGEST if bits == 8 else 8 * COARSE - COARSE / 2
    expected = points.clamp(-edge, edge)
    assert (decoded - expected).abs().max() <= step / 2


def test_a_corrected_distance() -> None:
    """For ‖Px - Pk‖² = 10, ‖x⊥‖ = 2 and ‖k⊥‖ = 3; and for a key equal to the query."""
    correction = Correction(*torch.tensor([0.5, 0.25, 1.0, 0.125]))
    estimate, query = torch.tensor([[10 + 9 / 8, 0.0]]), torch.tensor([4.0])
    corrected = correction.apply(estimate, query, torch.tensor([[3.0, 0.0]]))
    assert corrected.tolist() == [[10 + 4 + 9 - 0.5 * 2 * 2 * 3 - 0.25 * 10 - 1, 4 - 1]]
    below = correction._replace(surplus=torch.tensor(1e9))
    assert below.apply(estimate, query, torch.zeros(1, 2)).eq(0).all()


def pairs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ‖Px - Pk‖², ‖x⊥‖² and ‖k⊥‖ for pairs of points."""
    projected, query, key = 1e4 + 1e4 * torch.rand(3, count)
    return projected, query, key.sqrt()


def test_a_correction_is_recovered() -> None:
    projected, query, key = pairs(400)
    true = Correction(*torch.tensor([0.75, 0.05, 30.0, 0.25 / 0.95]))
    estimate = projected + true.weight * key.square()
    exact = true.apply(estimate[:, None], query, key[:, None]).squeeze(1)
    found = fit_correction(projected, query, key, exact + 0.01 * torch.randn(400))
    assert all(part.dtype == torch.float32 and part.shape == () for part in found)
    torch.testing.assert_close(torch.stack(found), torch.stack(true), rtol=1e-3, atol=1e-2)


def test_nothing_to_correct() -> None:
    nothing = torch.zeros(0)
    assert fit_correction(nothing, nothing, nothing, nothing) == (0, 0, 0, 0)


def test_a_correction_fitted_to_equal_pairs() -> None:
    projected, query, key = (part.expand(50) for part in pairs(1))
    found = fit_correction(projected, query, key, 20 + torch.rand(50))
    assert torch.stack(found).isfinite().all()
    estimate = projected + found.weight * key.square()
    corrected = found.apply(estimate[:, None], query, key[:, None])
    torch.testing.assert_close(corrected.mean(), torch.tensor(20.5), rtol=0.02, atol=0)


def test_a_correction_where_nothing_was_dropped() -> None:
    projected, nothing = pairs(300)[0], torch.zeros(300)
    found = fit_correction(projected, nothing, nothing, 0.9 * projected - 7)
    torch.testing.assert_close(torch.stack(found[1:3]), torch.tensor([0.1, 7.0]), **CLOSE)
    assert 0 <= found.weight <= 1


def test_a_correction_stays_within_bounds() -> None:
    """Pairs that would make every far key near are not believed."""
    projected, query, key = pairs(300)
    found = fit_correction(projected, query, key, torch.zeros(300))
    assert 0 <= found.correlation <= 1
    assert found.shrinkage < 1
    assert 0 <= found.weight <= 1


# Values


@every_bits
@pytest.mark.parametrize(("experts", "scale"), [(1, 1.0), (7, 1e-2), (60, 1e5), (64, 1e3)])
def test_a_value_is_off_by_half_a_step_of_its_row(bits: int, experts: int, scale: float) -> None:
    values = scale * (torch.randn(50, experts) * torch.rand(50, 1) + torch.randn(experts))
    packed = PackedValues.of(values, bits)
    assert packed.codes.shape == (50, -(-experts * bits // 8))
    error = (packed.at(torch.arange(50)) - values).abs()
    step = packed.steps.double()[:, None]
    largest = 7 if bits == 4 else 127
    rounded = largest * 2**-25  # the rounding of a step that is subnormal in fp16
    assert (error <= step / 2 + rounded + 1e-5 * scale).all()
    spread = (values - values.mean(dim=0)).abs().amax(dim=-1, keepdim=True)
    torch.testing.assert_close(step, (spread / largest).double(), rtol=1e-3, atol=1e-7)


@every_bits
@pytest.mark.parametrize("count", [1, 6])
def test_equal_values_are_kept_exactly(bits: int, count: int) -> None:
    values = torch.tensor([0.0, 3.25, -1e6]).expand(count, -1)
    packed = PackedValues.of(values, bits)
    assert packed.steps.eq(0).all()
    assert torch.equal(packed.at(torch.arange(count)), values)


@every_bits
def test_a_row_at_the_mean_is_kept_exactly(bits: int) -> None:
    packed = PackedValues.of(torch.tensor([[1.0, 4, -2], [0, 0, 0], [-1, -4, 2]]), bits)
    assert packed.steps[1] == 0
    assert packed.at(torch.tensor(1)).tolist() == [0, 0, 0]


@every_bits
def test_values_too_large_for_their_step_stay_finite_and_in_order(bits: int) -> None:
    values = torch.tensor([[1e30, 0, -1e30], [-1e30, 0, 1e30]])
    unpacked = PackedValues.of(values, bits).at(torch.arange(2))
    assert unpacked.isfinite().all()
    assert torch.equal(unpacked.sign(), values.sign())


@every_bits
def test_values_are_read_in_any_shape(bits: int) -> None:
    packed = PackedValues.of(torch.randn(20, 5), bits)
    places = torch.randint(20, (3, 4))
    unpacked = packed.at(places)
    assert unpacked.shape == (3, 4, 5)
    assert unpacked.dtype == torch.float32
    assert torch.equal(unpacked[1, 2], packed.at(places[1, 2]))
