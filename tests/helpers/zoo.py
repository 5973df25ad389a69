"""Small models with random weights, one for each family, and texts of random words for them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from helpers.families import FAMILIES
from knn_moe import BuildConfig
from knn_moe.reference.windows import Batch

VOCABULARY = 128
BUILD = BuildConfig(learning_rate=5.0, batch_tokens=64)


def family(name: str) -> PreTrainedModel:
    """Build the small model of a family."""
    return next(entry for entry in FAMILIES if entry.name == name).build()


def make_texts(count: int, seed: int = 0, shortest: int = 4, longest: int = 24) -> list[str]:
    """Make texts of random words, each a token of the number tokenizer."""
    draw = random.Random(seed)
    return [
        " ".join(str(draw.randrange(3, VOCABULARY)) for _ in range(draw.randint(shortest, longest)))
        for _ in range(count)
    ]


def encode(tokenizer: Callable[..., dict[str, list[int]]], text: str) -> torch.Tensor:
    """Return token ids as a batch of one. Shape [1, T]."""
    return torch.tensor([tokenizer(text)["input_ids"]])


def full_batch(ids: torch.Tensor) -> Batch:
    """Make a batch without padding, every token of which counts. Shapes: ids [B, T]."""
    everything = torch.ones_like(ids, dtype=torch.bool)
    owner = torch.arange(1, len(ids) + 1)
    return Batch(ids, everything, everything, everything, owner, spans=[], padded=False)


TEXTS = make_texts(12)
