"""What is shipped: the wheel, and the Dockerfile that installs it."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from helpers.clean_environment import build_wheel
from knn_moe.support.embedded_models import EMBEDDED_MODELS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "src/knn_moe"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert len(tracked) > 200
    assert {name.removeprefix("src/") for name in tracked} <= packed
    for model in EMBEDDED_MODELS:
        assert f"knn_moe/assets/{model}/model.safetensors" in packed
    assert {"knn_moe/py.typed", "knn_moe/pages/base.html.j2"} <= packed
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    sources = [name for line in copied for name in line.split()]
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert {"pyproject.toml", "constraints.txt", "src"} <= set(sources)
    for name in sources:
        assert (ROOT / name).exists()
        assert name in allowed
