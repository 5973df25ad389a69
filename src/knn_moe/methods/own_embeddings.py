"""How texts are embedded for a method: by an embedding model, or by the model itself.

The environment variable KNN_MOE_EMBEDDING=own chooses the model itself, where there is no room for
an embedding model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from knn_moe.methods import embedding
from knn_moe.methods.task_context import TaskContext
from knn_moe.routers.model_state import input_device, unwrap

OWN: Final = "own"  # the model's own input embeddings


class Embed(Protocol):
    """Turns n texts into unit vectors [n, d] fp32 on the CPU."""

    @property
    def name(self) -> str: ...

    def __call__(self, texts: Sequence[str]) -> Tensor: ...


def find_embedder(context: TaskContext, name: str | None = None) -> Embed:
    """Return what embeds texts.

    Args:
        context: The model that embeds texts itself if the name is "own".
        name: As for `load_embedder`, or "own".
    """
    if name == OWN or (name is None and uses_own_embeddings()):
        return OwnEmbeddings(context.model, context.tokenizer)
    return embedding.load_embedder(name)


def uses_own_embeddings() -> bool:
    """Return whether the environment says that the model embeds texts itself."""
    return os.environ.get(embedding.VARIABLE) == OWN


def check_embedder() -> None:
    """Refuse to embed texts, before any model is loaded, if nothing is there that could.

    Raises:
        ConfigError: There is no embedding model on this machine, or no such one.
        MissingDependencyError: The packaged model is not installed.
    """
    if not uses_own_embeddings():
        embedding.find_model()


class OwnEmbeddings:
    """Embeds a text as the mean of its tokens' input embeddings; needs only the model itself."""

    name = OWN

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        table = unwrap(self._model).get_input_embeddings()
        device = input_device(self._model)
        rows = (torch.tensor(self._tokenizer(text)["input_ids"], device=device) for text in texts)
        means = torch.stack([table(row).float().mean(dim=0) for row in rows])
        return torch.nn.functional.normalize(means, dim=1).cpu()
