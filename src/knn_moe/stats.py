"""Is a difference real: paired statistics over test items.

Knows arrays of numbers; nothing of models or tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from knn_moe.errors import ConfigError

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Scores: TypeAlias = Sequence[float] | np.ndarray[Any, np.dtype[Any]]

_DRAWS: Final = 1 << 17  # items drawn at a time: 1 MB of indices, which stays in the cache


@dataclass(frozen=True)
class Comparison:
    """A mean paired difference, its 95 % interval and its two-sided p-value."""

    difference: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        return self.p < 0.05


def paired_bootstrap(
    first: Scores,
    second: Scores,
    resamples: int = 10_000,
    seed: int = 0,
    *,
    weights: Scores | None = None,
) -> Comparison:
    """Whether `first` scores differently from `second` on the same items, by resampling items.

    The difference is the mean of first - second; with weights, Σ w d / Σ w, the weights drawn
    together with their items. The interval is the resamples' 2.5th to 97.5th percentile. The
    p-value is twice the share of resamples on the rarer side of zero, those at zero counted on
    both sides and the data themselves as one more: never 0, and 1 if nothing differs.
    Shapes: first, second, weights [n].
    """
    difference, weight = _checked(first, second, weights)
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
    """Means of `resamples` draws of n items from n. Shapes: [n], [n] → [resamples]."""
    draw = np.random.default_rng(seed)
    items = len(difference)
    weighted = difference if weight is None else difference * weight
    at_once = max(1, _DRAWS // items)
    means = np.empty(resamples)
    for start in range(0, resamples, at_once):
        part = means[start : start + at_once]
        # 64-bit indices: `take` would widen narrower ones first, at more than their drawing saves.
        chosen = draw.integers(items, size=(len(part), items))
        total = items if weight is None else weight.take(chosen).sum(axis=1)
        part[:] = weighted.take(chosen).sum(axis=1) / total
    return means


def _checked(first: Scores, second: Scores, weights: Scores | None) -> tuple[Array, Array | None]:
    """The differences [n] and the weights [n], or what is wrong with them."""
    columns = [np.asarray(column, dtype=np.float64) for column in (first, second)]
    weight = None if weights is None else np.asarray(weights, dtype=np.float64)
    shapes = [column.shape for column in (*columns, *([] if weight is None else [weight]))]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        shown = ", ".join(map(str, shapes))
        raise ConfigError(f"Paired scores need one number for each item, in equal order: {shown}.")
    if shapes[0] == (0,):
        raise ConfigError("There are no items to compare.")
    for column in columns:
        if not np.isfinite(column).all():
            item = int(np.flatnonzero(~np.isfinite(column))[0])
            raise ConfigError(f"Item {item} has the score {column[item]}: leave it out of both.")
    if weight is not None and not ((weight > 0) & np.isfinite(weight)).all():
        raise ConfigError("Every weight must be a positive number: leave items of no weight out.")
    return columns[0] - columns[1], weight
