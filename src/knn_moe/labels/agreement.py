"""The answer that most of several answers agree on. Knows texts only."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

Same: TypeAlias = Callable[[str, str], bool]
_EDGES: Final = string.punctuation + string.whitespace


class Majority(NamedTuple):
    """The most frequent answer, and the share of all answers that agree with it."""

    answer: str
    share: float


def same_words(one: str, two: str) -> bool:
    """Return whether two answers differ only in case, spaces, and punctuation at either end."""
    return _normalise(one) == _normalise(two)


def _normalise(answer: str) -> str:
    return " ".join(answer.casefold().split()).strip(_EDGES)


def majority(answers: Sequence[str], same: Same = same_words) -> Majority:
    """Return the most frequent answer, in its most frequent wording.

    Args:
        answers: At least one. Each joins the group of the first answer that it is the same as; of
            groups of equal size, the first wins.
        same: Whether two answers agree.
    """
    groups: list[list[str]] = []
    for answer in answers:
        group = next((group for group in groups if same(group[0], answer)), None)
        if group is None:
            groups.append([answer])
        else:
            group.append(answer)
    largest = max(groups, key=len)
    return Majority(Counter(largest).most_common(1)[0][0], len(largest) / len(answers))
