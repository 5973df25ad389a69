"""Statistics over items: scipy's and plain loops' numbers, in little memory, right about chance."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from knn_moe.errors import ConfigError
from knn_moe.support.statistics import (
    Accuracy,
    Comparison,
    accuracy,
    by_tercile,
    holm,
    paired_bootstrap,
    pooled,
)

steady = settings(derandomize=True, deadline=None, max_examples=40)

# Halves of small whole numbers: their sums and differences are exact.
scores = st.integers(1, 12).flatmap(
    lambda n: arrays(np.float64, (2, n), elements=st.integers(-20, 20).map(lambda x: x / 2))
)


def plain_bootstrap(
    first: np.ndarray, second: np.ndarray, resamples: int, weights: np.ndarray | None = None
) -> Comparison:
    """As a textbook has it, one resample after the other, with random numbers of its own."""
    draw = np.random.default_rng(12345)
    difference = first - second
    weights = np.ones_like(difference) if weights is None else weights
    means = []
    for _ in range(resamples):
        total = weight = 0.0
        for item in draw.choice(len(difference), len(difference)):
            total += weights[item] * difference[item]
            weight += weights[item]
        means.append(total / weight)
    below, above = sum(m <= 0 for m in means), sum(m >= 0 for m in means)
    return Comparison(
        float((weights * difference).sum() / weights.sum()),
        float(np.percentile(means, 2.5)),
        float(np.percentile(means, 97.5)),
        min(1.0, 2 * (min(below, above) + 1) / (resamples + 1)),
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_equals_a_plain_loop(weighted: bool) -> None:
    draw = np.random.default_rng(3)
    first, second = draw.normal(0.25, 1, 60), draw.normal(0, 1, 60)
    # Heavy items differ more: a mean that forgets the weights is far off.
    weights = np.where(first > second, 5.0, 1.0) if weighted else None
    quick = paired_bootstrap(first, second, weights=weights)
    slow = plain_bootstrap(first, second, 4000, weights)
    assert quick.difference == pytest.approx(slow.difference, rel=1e-12)
    assert quick.low == pytest.approx(slow.low, abs=0.03)
    assert quick.high == pytest.approx(slow.high, abs=0.03)
    assert quick.p == pytest.approx(slow.p, abs=0.03)
    if weighted:
        assert paired_bootstrap(first, second).high < quick.difference
    else:
        assert 0.02 < quick.p < 0.98


@pytest.mark.slow
def test_equals_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(4)
    first, second = draw.normal(0.2, 1, 200), draw.normal(0, 1, 200)
    theirs = stats.bootstrap(
        (first - second,), np.mean, n_resamples=20_000, method="percentile", rng=5
    ).confidence_interval
    ours = paired_bootstrap(first, second, resamples=20_000)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_p_by_counting() -> None:
    # One item in three is against it: a resample of three is at or below zero if it has two or
    # three of that one (7 of 27), and above otherwise.
    result = paired_bootstrap([1, 1, 0], [0, 0, 1], resamples=50_000)
    assert result.difference == pytest.approx(1 / 3)
    assert result.p == pytest.approx(2 * 7 / 27, abs=0.01)


@pytest.mark.slow
@given(pair=scores, shift=st.integers(-1000, 1000))
@steady
def test_the_same_shift_in_both_changes_nothing(pair: np.ndarray, shift: int) -> None:
    first, second = pair
    moved = paired_bootstrap(first + shift, second + shift, resamples=200)
    assert moved == paired_bootstrap(first, second, resamples=200)


@given(pair=scores)
@steady
def test_changing_places_changes_the_sign(pair: np.ndarray) -> None:
    first, second = pair
    one = paired_bootstrap(first, second, resamples=200)
    other = paired_bootstrap(second, first, resamples=200)
    assert other.p == one.p
    assert other.difference == -one.difference
    assert (other.low, other.high) == pytest.approx((-one.high, -one.low), abs=1e-9)


@given(pair=scores, weight=st.integers(1, 9), seed=st.integers(0, 5))
@steady
def test_equal_weights_are_no_weights(pair: np.ndarray, weight: int, seed: int) -> None:
    first, second = pair
    plain = paired_bootstrap(first, second, 200, seed)
    weighted = paired_bootstrap(first, second, 200, seed, weights=np.full(len(first), weight))
    assert weighted.p == plain.p
    assert (weighted.difference, weighted.low, weighted.high) == pytest.approx(
        (plain.difference, plain.low, plain.high), abs=1e-9
    )


@given(pair=scores)
@steady
def test_the_interval_and_p_are_in_their_ranges(pair: np.ndarray) -> None:
    first, second = pair
    result = paired_bootstrap(first, second, resamples=200)
    difference = first - second
    assert difference.min() <= result.low <= result.high <= difference.max()
    assert 2 / 201 <= result.p <= 1


@given(column=arrays(np.float64, st.integers(1, 20), elements=st.floats(-1e6, 1e6)))
@steady
def test_no_difference_has_p_one(column: np.ndarray) -> None:
    result = paired_bootstrap(column, column, resamples=100)
    assert result == Comparison(0.0, 0.0, 0.0, 1.0)
    assert not result.significant


def test_p_is_never_zero() -> None:
    result = paired_bootstrap(np.arange(50) + 1.0, np.arange(50), resamples=999)
    assert result.p == 2 / 1000
    assert {type(value) for value in vars(result).values()} == {float}  # as JSON wants it
    assert result.significant


def test_a_seed_gives_one_result() -> None:
    draw = np.random.default_rng(7)
    first, second = draw.normal(size=(2, 30))
    assert paired_bootstrap(first, second) == paired_bootstrap(list(first), list(second))
    assert paired_bootstrap(first, second, seed=1) != paired_bootstrap(first, second, seed=2)


def test_chance_is_called_significant_one_time_in_twenty() -> None:
    draw = np.random.default_rng(8)
    found = sum(
        paired_bootstrap(*draw.normal(size=(2, 80)), resamples=1000, seed=number).significant
        for number in range(200)
    )
    assert 3 <= found <= 20  # 10 expected


@pytest.mark.slow
def test_few_items_are_surely_less_by_chance_no_more_than_one_time_in_forty() -> None:
    """Of six items, a plain bootstrap calls it significant in that direction more often."""
    draw = np.random.default_rng(0)
    zeros = np.zeros(6)
    found = [paired_bootstrap(draw.normal(size=6), zeros, 400) for _ in range(1500)]
    plain = np.mean([one.significant and one.difference < 0 for one in found])
    sure = np.mean([one.surely_less(6) for one in found])
    assert sure < 0.03 < 0.045 < plain
    clear = Comparison(difference=-1.0, low=-1.2, high=-0.8, p=0.01)
    assert clear.surely_less(6)
    assert not clear.surely_less(1)
    assert not Comparison(difference=1.0, low=0.8, high=1.2, p=0.01).surely_less(6)


def test_memory_is_bounded() -> None:
    first, second = np.random.default_rng(9).normal(size=(2, 14_000))
    tracemalloc.start()
    paired_bootstrap(first, second, resamples=600, weights=np.ones(14_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6  # whole, the indices alone are 67 MB


def test_what_cannot_be_compared_is_told() -> None:
    with pytest.raises(ConfigError, match=r"\(2,\), \(3,\)"):
        paired_bootstrap([1, 2], [1, 2, 3])
    with pytest.raises(ConfigError, match=r"\(2,\), \(2,\), \(1,\)"):
        paired_bootstrap([1, 2], [1, 2], weights=[1])
    with pytest.raises(ConfigError, match="one number for each item"):
        paired_bootstrap(np.ones((2, 2)), np.ones((2, 2)))
    with pytest.raises(ConfigError, match="no items"):
        paired_bootstrap([], [])
    with pytest.raises(ConfigError, match="Item 1 has the score nan"):
        paired_bootstrap([1, 2], [1, float("nan")])
    with pytest.raises(ConfigError, match="Item 0 has the score inf"):
        paired_bootstrap([float("inf"), 2], [float("inf"), 2])
    with pytest.raises(ConfigError, match="weight"):
        paired_bootstrap([1, 2], [1, 2], weights=[1, 0])
    with pytest.raises(ConfigError, match="resamples"):
        paired_bootstrap([1, 2], [1, 2], resamples=0)


@pytest.mark.parametrize(("right", "items"), [(0, 7), (7, 7), (1, 1), (3, 10), (5000, 14_000)])
def test_accuracy_of_right_and_wrong_is_wilsons(right: int, items: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    result = accuracy([True] * right + [False] * (items - right))
    theirs = stats.binomtest(right, items).proportion_ci(method="wilson")
    assert result.mean == right / items
    assert (result.low, result.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert 0 <= result.low <= result.mean <= result.high <= 1
    assert result.items == items


def test_accuracy_of_other_scores_is_a_normal_interval() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(10).random(50)
    result = accuracy(values)
    theirs = stats.norm.interval(0.95, loc=values.mean(), scale=stats.sem(values))
    assert (result.low, result.high) == pytest.approx(theirs, rel=1e-12)
    assert result.mean == pytest.approx(values.mean())
    # 0, 1 and one score between them: no counts, so no Wilson.
    mixed = accuracy([0, 1, 0.5])
    assert (mixed.low, mixed.high) == pytest.approx(stats.norm.interval(0.95, 0.5, 0.5 / 3**0.5))


def test_accuracy_is_plain_numbers() -> None:
    result = accuracy(np.array([1, 0, 1], dtype=np.float32))
    assert result == accuracy([1.0, 0.0, 1.0])
    assert [type(value) for value in vars(result).values()] == [float, float, float, int]
    assert accuracy([2.0, 2.0]) == Accuracy(2.0, 2.0, 2.0, 2)


@pytest.mark.parametrize("items", [3, 4, 5, 61])
def test_terciles_equal_a_plain_loop(items: int) -> None:
    draw = np.random.default_rng(items)
    # Few distinct perplexities: many ties, which go by the items' order.
    perplexity = draw.integers(1, 6, items).astype(float)
    first, second = draw.integers(0, 2, (2, items))
    groups: list[list[int]] = [[], [], []]
    sizes = [(items + 2) // 3, (items + 1) // 3, items // 3]
    for item in sorted(range(items), key=lambda item: (perplexity[item], item)):
        groups[next(g for g in range(3) if len(groups[g]) < sizes[g])].append(item)
    result = by_tercile(perplexity, first, second, resamples=500, seed=3)
    for third, group in zip(result, groups, strict=True):
        assert third == paired_bootstrap(first[group], second[group], resamples=500, seed=3)
    assert (result.low, result.mid, result.high) == result


def test_the_hard_third_is_high() -> None:
    perplexity = [9.0, 1.0, 5.0, float("inf"), 2.0, 4.0]
    first = [1, 0, 0, 1, 0, 1]
    result = by_tercile(perplexity, first, [0] * 6)
    assert [third.difference for third in result] == [0, 0.5, 1]


def test_pooled_counts_items_and_not_tasks() -> None:
    draw = np.random.default_rng(11)
    large, small = draw.integers(0, 2, (2, 300)), draw.integers(0, 2, (2, 20))
    result = pooled({"large": tuple(large), "small": tuple(small)}, resamples=2000, seed=4)
    both = np.concatenate([large, small], axis=1)
    assert result == paired_bootstrap(*both, resamples=2000, seed=4)
    total = sum(a - b for a, b in both.T.tolist())
    assert result.difference == pytest.approx(total / 320)
    assert result.difference != pytest.approx(
        np.mean([(one - two).mean() for one, two in (large, small)])
    )
    assert pooled({"one": ([1, 2], [0, 3])}) == paired_bootstrap([1, 2], [0, 3])


def plain_holm(p_values: dict[str, float]) -> dict[str, float]:
    """Test by test: the smallest level of the family at which Holm's steps reject it."""
    ranked = sorted(p_values, key=lambda name: p_values[name])
    adjusted = {}
    for place, name in enumerate(ranked):
        levels = [(len(ranked) - i) * p_values[ranked[i]] for i in range(place + 1)]
        adjusted[name] = min(1.0, max(levels))
    return adjusted


@given(values=st.lists(st.floats(0, 1), max_size=8))
@steady
def test_holm_equals_a_plain_loop(values: list[float]) -> None:
    p_values = {str(number): value for number, value in enumerate(values)}
    result = holm(p_values)
    assert list(result) == list(p_values)
    assert result == pytest.approx(plain_holm(p_values))
    assert all(p_values[name] <= p <= 1 for name, p in result.items())


def test_holm_by_hand() -> None:
    result = holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.5})
    assert result == pytest.approx({"a": 0.09, "b": 0.04, "c": 0.09, "d": 0.5})
    assert {type(p) for p in result.values()} == {float}
    assert holm({}) == {}


def test_what_cannot_be_summed_up_is_told() -> None:
    with pytest.raises(ConfigError, match="no items"):
        accuracy([])
    with pytest.raises(ConfigError, match="Item 1 has the score nan"):
        accuracy([1, float("nan")])
    with pytest.raises(ConfigError, match="One item"):
        accuracy([0.5])
    with pytest.raises(ConfigError, match=r"each of 3 items, got 2 in the shape \(2,\)"):
        by_tercile([1, 2], [1, 2, 3], [1, 2, 3])
    with pytest.raises(ConfigError, match="got 2 in the shape"):
        by_tercile([1, float("nan"), 2], [1, 2, 3], [1, 2, 3])
    with pytest.raises(ConfigError, match="at least three items, got 2"):
        by_tercile([1, 2], [1, 2], [1, 2])
    with pytest.raises(ConfigError, match="no tasks"):
        pooled({})
    with pytest.raises(ConfigError, match="gpqa: There are no items"):
        pooled({"mmlu": ([1], [1]), "gpqa": ([], [])})
    with pytest.raises(ConfigError, match="got nan for 'b'"):
        holm({"a": 0.5, "b": float("nan")})
    with pytest.raises(ConfigError, match=r"got 1\.5 for 'a'"):
        holm({"a": 1.5})
