"""Run the command line, on a model and a memory that are made once a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from conftest import family, make_texts
from knn_moe.bench.models import number_tokenizer
from knn_moe.cli.main import main

TEXTS = make_texts(20)


def knn_moe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def save_model(name: str, folder: Path) -> Path:
    family(name).save_pretrained(folder)
    number_tokenizer(128).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("olmoe", tmp_path_factory.mktemp("models") / "olmoe")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "ref.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def compressed(memory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memories") / "compressed"
    assert knn_moe("compress", memory, "-o", folder).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def memory(model: Path, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memories") / "memory"
    result = knn_moe("build", model, reference, "-o", folder, "--learning-rate", 5)
    assert result.exit_code == 0, result.output
    return folder


def assert_refused(result: Result, *says: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    message = result.stderr.strip().splitlines()
    for words in says:
        assert words in " ".join(message), result.stderr
    assert "Traceback" not in result.stderr
