"""Verdicts are written as they come, and a judge is not asked twice."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from knn_moe.errors import LabelError
from knn_moe.labels.verdicts import WrittenVerdicts


class Counting:
    """A judge that counts how often it is asked, and fails after some verdicts."""

    def __init__(self, most: int = 99) -> None:
        self.asked, self.most = 0, most

    def __call__(self, prompt: str, answer: str) -> float:
        if self.asked == self.most:
            raise LabelError("gone")
        self.asked += 1
        return math.nan if answer == "unclear" else len(answer) / 10


def test_an_interrupted_judge_continues(tmp_path: Path) -> None:
    path = tmp_path / "verdicts"
    answers = ["a", "unclear", "abc", "abcd"]
    first = WrittenVerdicts(Counting(3), path, "judge-1")
    assert not path.exists()
    assert first("p", "a") == 0.1
    assert len(path.read_text().splitlines()) == 1  # at once
    with pytest.raises(LabelError, match="gone"):
        list(map(first, "pppp", answers))
    judge = Counting()
    again = WrittenVerdicts(judge, path, "judge-1")
    scores = list(map(again, "pppp", answers))
    assert judge.asked == 1
    assert scores[0] == 0.1
    assert math.isnan(scores[1])
    assert scores[2:] == [0.3, 0.4]
    again.remove()
    assert not path.exists()


def test_a_line_that_was_cut_off_is_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "verdicts"
    for answer in ("a", "ab"):
        WrittenVerdicts(Counting(), path, "judge-1")("p", answer)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    judge = Counting()
    again = WrittenVerdicts(judge, path, "judge-1")
    assert [again("p", "a"), again("p", "ab")] == [0.1, 0.2]
    assert judge.asked == 1
    assert path.read_bytes() == whole


def test_another_judge_is_asked_again(tmp_path: Path) -> None:
    path, judge = tmp_path / "verdicts", Counting()
    for identity in ("judge-1", "judge-2"):
        WrittenVerdicts(judge, path, identity)("p", "a")
    assert judge.asked == 2


@pytest.mark.parametrize("text", ["{\n", "[]\n", '{"key": "a"}\n', '{"key": 1, "score": "x"}\n'])
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "verdicts"
    path.write_text(text)
    with pytest.raises(LabelError, match="Remove the file"):
        WrittenVerdicts(Counting(), path, "judge-1")
