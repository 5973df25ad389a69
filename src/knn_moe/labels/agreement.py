"""What most of several answers say. Knows texts only."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

Same: TypeAlias = Callable[[str, str], bool]
_EDGES: Final = string.punctuation + string.whitespace


class Majority(NamedTuple):
    """The answer most often given, and the share of all that say the same."""

    answer: str
    share: float


def same_words(one: str, two: str) -> bool:
    """But for case, spaces, and punctuation at either end."""
    return normalised(one) == normalised(two)


def normalised(answer: str) -> str:
    return " ".join(answer.casefold().split()).strip(_EDGES)


def majority(answers: Sequence[str], same: Same = same_words) -> Majority:
    """Each answer goes with the first one that it is the same as; of groups alike, the first.

    The group is told in its most frequent words.
    """
    groups: list[list[str]] = []
    for answer in answers:
        for group in groups:
            if same(group[0], answer):
                group.append(answer)
                break
        else:
            groups.append([answer])
    largest = max(groups, key=len)
    return Majority(Counter(largest).most_common(1)[0][0], len(largest) / len(answers))
