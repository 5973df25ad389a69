"""Names that are known, and the one answer to a name that is not."""

from __future__ import annotations

import pytest

from knn_moe.errors import ConfigError, TaskError
from knn_moe.support.progress import Progress, StepCounter
from knn_moe.support.registry import Registry, unknown_name


def test_an_unknown_name_is_answered_with_the_close_one_and_all_there_are() -> None:
    tasks = Registry("task", {"sciq": 1, "piqa": 2}, TaskError)
    assert tasks.find("piqa") == tasks["piqa"] == 2
    assert list(tasks) == ["sciq", "piqa"]
    expected = "Unknown task 'sciqq'. Did you mean 'sciq'? Available: sciq, piqa. Or a file."
    with pytest.raises(TaskError) as error:
        tasks.find("sciqq", " Or a file.")
    assert str(error.value) == expected
    with pytest.raises(ConfigError, match=r"^Unknown color 'x'\. Available: red\.$"):
        Registry("color", {"red": 0}).find("x")
    assert unknown_name("gradient", 3, ("sparse",)) == "Unknown gradient 3. Available: sparse."


def test_steps_of_several_stages_count_towards_one_total() -> None:
    seen: list[Progress] = []
    counter = StepCounter(seen.append, 3)
    first, second = counter.steps_of("first"), counter.steps_of("second")
    for step in (first, first, second):
        step()
    assert seen == [Progress("first", 1, 3), Progress("first", 2, 3), Progress("second", 3, 3)]
