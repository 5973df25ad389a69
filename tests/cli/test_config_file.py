"""`--config run.toml`: options from a file, checked as those of the command line, which wins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import assert_refused, run_cli
from knn_moe import RoutingMemory

Write = Callable[[str], Path]


@pytest.fixture
def config(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf8")
        return path

    return write


def test_the_command_line_wins(
    config: Write, saved_model: Path, reference_file: Path, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    path = config(f"learning-rate = 2\nsteps = 2\noutput = {json.dumps(str(memory))}\njson = true")
    built = run_cli("build", saved_model, reference_file, "--config", path, "--steps", 1)
    assert built.exit_code == 0, built.output
    assert json.loads(built.stdout)["folder"] == str(memory)
    build = RoutingMemory.from_pretrained(memory).build
    assert (build.learning_rate, build.steps) == (2.0, 1)


def test_options_that_can_be_repeated(config: Write, tmp_path: Path) -> None:
    path = config('task = ["no-task", "sciq"]\nmethod = "zero-shot"\noutput = "runs"')
    assert_refused(run_cli("eval", "tiny-olmoe", "--config", path), "Unknown task 'no-task'")
    path = config('task = "sciq"\nmethod = ["no-method"]\noutput = "runs"')
    assert_refused(run_cli("eval", "tiny-olmoe", "--config", path), "Unknown method 'no-method'")


def test_a_group_of_commands(config: Write) -> None:
    path = config('output = "study"')
    assert_refused(run_cli("reproduce", "no-table", "--config", path), "Unknown table 'no-table'")
    path = config('keys = "many"')
    assert_refused(run_cli("bench", "retrieval", "--config", path), "'--keys': 'many' is not")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 1", "Unknown option 'stepps'. Did you mean 'steps'? Available: output, "),
        ("overwrite = true", "Unknown option 'overwrite'"),
        ("model = 'm'", "Unknown option 'model'"),
        ("steps = 1.5", "'--steps': '1.5' is not a valid integer"),
        ("steps = [1]", "run.toml': steps must be a text or a number, got [1]"),
        ("steps = true", "steps must be a text or a number, got True"),
        ("calibrate = 'yes'", "calibrate must be true or false, got 'yes'"),
        ("steps = 1\nsteps = 2", "is not a TOML file: Cannot overwrite a value (at "),
        ("[build]\nsteps = 1", "Unknown option 'build'"),
    ],
)
def test_what_is_refused(
    text: str, message: str, config: Write, saved_model: Path, reference_file: Path, tmp_path: Path
) -> None:
    path = config(text)
    memory = tmp_path / "memory"
    build = ("build", saved_model, reference_file, "-o", memory, "--config", path)
    assert_refused(run_cli(*build), message)
    assert not memory.exists()


def test_a_file_that_is_not_there(saved_model: Path, reference_file: Path, tmp_path: Path) -> None:
    build = ("build", saved_model, reference_file, "-o", tmp_path / "m", "--config", "no.toml")
    assert_refused(run_cli(*build), "'no.toml' does not exist")
