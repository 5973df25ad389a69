"""Sentence embeddings: the vectors of the plain model, and never of another than the named one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

from knn_moe.errors import ConfigError, MissingDependencyError
from knn_moe.methods import embedding
from knn_moe.methods.embedding import PACKAGED, PAPER_MODEL, VARIABLE, load_embedder

TEXTS = [
    "What is the capital of France?",
    "Which gas do plants take in?",
    "Name the city in which France has its government.",
]


@pytest.fixture
def nothing_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty, offline hub cache, and no environment variable."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv(VARIABLE, raising=False)
    yield tmp_path / "hub"
    embedding._load.cache_clear()


def packaged() -> Path:
    folder = embedding._package_folder()
    assert folder is not None
    return folder


@pytest.mark.slow
def test_vectors_are_those_of_the_plain_model() -> None:
    """Mean pooling of the last layer, by transformers alone."""
    found = load_embedder(PACKAGED)(TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(packaged())
    model = AutoModel.from_pretrained(packaged(), dtype=torch.float32).eval()
    read = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**read).last_hidden_state
    mask = read["attention_mask"][:, :, None]
    expected = F.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    cosines = found @ found.T
    assert cosines[0, 2] > 0.5 > cosines[0, 1]


def test_loading_again_gives_the_same_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    embedding._load.cache_clear()
    first = load_embedder(PACKAGED)
    vectors = first(TEXTS)
    assert load_embedder(PACKAGED) is first
    embedding._load.cache_clear()
    assert torch.equal(load_embedder(PACKAGED)(TEXTS), vectors)
    assert capfd.readouterr() == ("", "")


def test_the_default_is_the_packaged_model(nothing_downloaded: Path) -> None:
    assert load_embedder().name == PACKAGED


def test_the_papers_model_is_used_if_it_is_downloaded(nothing_downloaded: Path) -> None:
    home = nothing_downloaded / f"models--{PAPER_MODEL.replace('/', '--')}"
    snapshot = home / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(packaged())  # small weights in the place of the paper's
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc", encoding="utf8")
    found = load_embedder()
    assert found.name == PAPER_MODEL
    assert found(TEXTS).shape == (3, 384)


@pytest.mark.slow
def test_the_environment_variable_comes_first(
    nothing_downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(packaged()))
    found = load_embedder()
    assert found.name == str(packaged())
    assert torch.equal(found(TEXTS), load_embedder(PACKAGED)(TEXTS))
    monkeypatch.setenv(VARIABLE, "nobody/nothing")
    with pytest.raises(
        ConfigError, match="'nobody/nothing' is not a folder, and it cannot be found on the hub"
    ):
        load_embedder()


def test_a_folder_without_an_embedding_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no embedding model: modules\.json is missing"):
        load_embedder(str(tmp_path))
    (tmp_path / "modules.json").write_text('[{"type": "x.y.Z"}]', encoding="utf8")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_embedder(str(tmp_path))


def test_without_a_model_the_error_names_ways_to_get_one(
    nothing_downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGED.replace("-", "_"), None)
    with pytest.raises(
        ConfigError, match=f"hf download {PAPER_MODEL}`, or pip install {PACKAGED}, or"
    ):
        load_embedder()
    with pytest.raises(MissingDependencyError, match=f"pip install {PACKAGED}"):
        load_embedder(PACKAGED)


def test_without_sentence_transformers_the_error_names_the_cure(
    nothing_downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding._load.cache_clear()
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'knn-moe\[eval\]'"):
        load_embedder()
