"""Intervals of scores, and tests of whether two methods score differently on the same items.

Knows arrays of numbers and their names; knows nothing of models or tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from knn_moe.errors import ConfigError

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Scores: TypeAlias = Sequence[float] | np.ndarray[Any, np.dtype[Any]]

_DRAWS: Final = 1 << 17  # items drawn at a time: 1 MB of indices, which fits in the cache
_Z: Final = NormalDist().inv_cdf(0.975)  # standard errors on each side of a 95 % interval


@dataclass(frozen=True)
class Accuracy:
    """A mean score, its 95 % interval, and the number of items."""

    mean: float
    low: float
    high: float
    items: int


@dataclass(frozen=True)
class Comparison:
    """A mean paired difference, its 95 % interval and its two-sided p-value."""

    difference: float
    low: float
    high: float
    p: float
    doubt: ClassVar[str | None] = None  # a DoubtedComparison has one

    @property
    def significant(self) -> bool:
        """Whether p < 0.05, and nothing speaks against reading it."""
        return self.p < 0.05 and self.doubt is None

    def surely_less(self, items: int) -> bool:
        """Tell whether the difference is below zero, even if there are few items.

        Resampling few items makes intervals too narrow. So the interval is widened as Student's
        distribution is wider than the normal one (the first terms of its expansion).
        """
        if items < 2:
            return False
        free, z = items - 1, _Z
        student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
        wider = student / z * (items / free) ** 0.5
        return self.significant and self.difference + wider * (self.high - self.difference) < 0


@dataclass(frozen=True)
class DoubtedComparison(Comparison):
    """A difference that must not be read as better or worse, whatever its p-value is, and why."""

    doubt: str  # type: ignore[misc]  # here it is a field

    @classmethod
    def of(cls, comparison: Comparison, doubt: str | None) -> Comparison:
        """Return the comparison with its doubt, or as it is if there is none."""
        if doubt is None:
            return comparison
        known = comparison.difference, comparison.low, comparison.high, comparison.p
        return cls(*known, doubt)


class Terciles(NamedTuple):
    """One comparison for each third of the items."""

    low: Comparison
    mid: Comparison
    high: Comparison


def accuracy(scores: Scores) -> Accuracy:
    """Return the mean of `scores` with its 95 % interval.

    The interval is Wilson's if every score is 0 or 1; otherwise the normal one, 1.96 standard
    errors of the mean on each side.

    Args:
        scores: One score for each item. Shape [n].

    Raises:
        ConfigError: There is no score, one is not finite, or one alone is neither 0 nor 1.
    """
    values, _ = _subtract(scores, np.zeros(np.shape(scores)), None)
    items, mean = len(values), float(values.mean())
    if np.isin(values, (0, 1)).all():
        shrink = 1 / (1 + _Z**2 / items)
        centre = shrink * (mean + _Z**2 / (2 * items))
        half = shrink * _Z * float(np.sqrt(mean * (1 - mean) / items + (_Z / (2 * items)) ** 2))
        low, high = max(0.0, centre - half), min(1.0, centre + half)
        # If all are 0 or all are 1, rounding would leave the mean just outside.
        return Accuracy(mean, min(mean, low), max(mean, high), items)
    if items == 1:
        raise ConfigError(f"One item (score {mean}) has no spread to measure. Add more items.")
    half = _Z * float(values.std(ddof=1) / np.sqrt(items))
    return Accuracy(mean, mean - half, mean + half, items)


def paired_bootstrap(
    first: Scores,
    second: Scores,
    resamples: int = 10_000,
    seed: int = 0,
    *,
    weights: Scores | None = None,
) -> Comparison:
    """Compare two scores of the same items by resampling the items.

    The difference is the mean of first - second; with weights, Σ w d / Σ w, each weight drawn with
    its item. The interval is the resamples' 2.5th to 97.5th percentile. The p-value is twice the
    share of resamples on the rarer side of zero. A resample at zero counts on both sides, and the
    data count as one more resample: p is never 0, and 1 if nothing differs.

    Args:
        first: One score for each item. Shape [n].
        second: The scores to compare with. Shape [n].
        resamples: How many resamples to draw.
        seed: The seed of the draws.
        weights: A positive weight for each item; None: all count the same. Shape [n].

    Raises:
        ConfigError: The shapes differ, there is no item, or a number is not finite.
    """
    difference, weight = _subtract(first, second, weights)
    return _bootstrap(difference, weight, resamples, seed)


def by_tercile(
    perplexity: Scores, first: Scores, second: Scores, resamples: int = 10_000, seed: int = 0
) -> Terciles:
    """Run `paired_bootstrap` within each third of the items, by the base model's perplexity (§5.2).

    The sizes of the thirds differ by at most one, the easier ones being larger; items of equal
    perplexity keep their order.

    Args:
        perplexity: The base model's, for each item. Shape [n].
        first: One score for each item. Shape [n].
        second: The scores to compare with. Shape [n].
        resamples: How many resamples to draw.
        seed: The seed of the draws.

    Raises:
        ConfigError: There are fewer than three items, or one has no perplexity.
    """
    difference, _ = _subtract(first, second, None)
    order = np.asarray(perplexity, dtype=np.float64)
    if order.shape != difference.shape or np.isnan(order).any():
        raise ConfigError(
            f"Terciles need a perplexity for each of {len(difference)} items, got "
            f"{int((~np.isnan(order)).sum())} in the shape {order.shape}."
        )
    if len(difference) < 3:
        raise ConfigError(f"Terciles need at least three items, got {len(difference)}.")
    thirds = split_terciles(order)
    return Terciles(*(_bootstrap(difference[part], None, resamples, seed) for part in thirds))


def split_terciles(perplexity: Scores) -> list[np.ndarray[Any, np.dtype[np.intp]]]:
    """Return the places of the items in each third, that of the lowest perplexity first."""
    order = np.asarray(perplexity, dtype=np.float64).argsort(kind="stable")
    return list(np.array_split(order, len(Terciles._fields)))


def pooled(
    parts: Mapping[str, tuple[Scores, Scores]], resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Run `paired_bootstrap` over the items of several tasks together (§5.1, "Avg.").

    Every item counts the same, so a task counts by its size.

    Args:
        parts: {task: (first [n], second [n])}, each task with its own n.
        resamples: How many resamples to draw.
        seed: The seed of the draws.

    Raises:
        ConfigError: There is no task, or a task's scores cannot be compared.
    """
    if not parts:
        raise ConfigError("There are no tasks to pool.")
    differences = []
    for name, (first, second) in parts.items():
        try:
            differences.append(_subtract(first, second, None)[0])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return _bootstrap(np.concatenate(differences), None, resamples, seed)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return Holm's adjusted p-values: below 0.05, each is significant within the whole family.

    The i-th smallest of m is multiplied by m - i + 1, and is no smaller than the one before it.

    Raises:
        ConfigError: A p-value is not between 0 and 1.
    """
    values = np.array(list(p_values.values()), dtype=np.float64)
    for name, value in p_values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"A p-value must be from 0 to 1, got {value} for {name!r}.")
    order = values.argsort(kind="stable")
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return dict(zip(p_values, adjusted.tolist(), strict=True))


def _bootstrap(difference: Array, weight: Array | None, resamples: int, seed: int) -> Comparison:
    if resamples < 1:
        raise ConfigError(f"resamples must be at least 1, got {resamples}.")
    means = _resampled_means(difference, weight, resamples, seed)
    low, high = np.percentile(means, [2.5, 97.5])
    rarer = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return Comparison(
        difference=float(np.average(difference, weights=weight)),
        low=float(low),
        high=float(high),
        p=min(1.0, 2 * (rarer + 1) / (resamples + 1)),
    )


def _resampled_means(difference: Array, weight: Array | None, resamples: int, seed: int) -> Array:
    """Return the means of `resamples` draws of n items from n. Shapes: [n], [n] → [resamples]."""
    draw = np.random.default_rng(seed)
    items = len(difference)
    weighted = difference if weight is None else difference * weight
    at_once = max(1, _DRAWS // items)
    means = np.empty(resamples)
    for start in range(0, resamples, at_once):
        part = means[start : start + at_once]
        # 64-bit indices: `take` converts narrower ones first, which costs more than it saves.
        chosen = draw.integers(items, size=(len(part), items))
        total = items if weight is None else weight.take(chosen).sum(axis=1)
        part[:] = weighted.take(chosen).sum(axis=1) / total
    return means


def _subtract(first: Scores, second: Scores, weights: Scores | None) -> tuple[Array, Array | None]:
    """Return the differences [n] and the weights [n]; raise ConfigError if they cannot be had."""
    columns = [np.asarray(column, dtype=np.float64) for column in (first, second)]
    weight = None if weights is None else np.asarray(weights, dtype=np.float64)
    shapes = [column.shape for column in (*columns, *([] if weight is None else [weight]))]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        shown = ", ".join(map(str, shapes))
        raise ConfigError(f"Paired scores need one number for each item, got the shapes {shown}.")
    if shapes[0] == (0,):
        raise ConfigError("There are no items to compare.")
    for column in columns:
        if not np.isfinite(column).all():
            item = int(np.flatnonzero(~np.isfinite(column))[0])
            raise ConfigError(f"Item {item} has the score {column[item]}. Leave it out of both.")
    if weight is not None and not ((weight > 0) & np.isfinite(weight)).all():
        raise ConfigError("Every weight must be a positive number. Leave out items of no weight.")
    return columns[0] - columns[1], weight
