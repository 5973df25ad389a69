"""The majority of several answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from knn_moe.labels.agreement import majority


def test_answers_that_differ_in_case_spaces_and_punctuation_agree() -> None:
    assert majority(["B.", " b", "A", "B."]) == ("B.", 0.75)
    assert majority(["A", "B"]) == ("A", 0.5)
    assert majority(["12", "12.0", "3"], lambda one, two: float(one) == float(two)) == ("12", 2 / 3)
    assert majority(["The  cat\nsat!", "the cat sat"]).share == 1


@given(st.lists(st.sampled_from("ab c"), min_size=1))
def test_a_majority_is_one_of_the_answers_and_counts_itself(answers: list[str]) -> None:
    answer, share = majority(answers)
    assert answer in answers
    assert round(share * len(answers)) >= answers.count(answer)
