"""Small models with random weights, one for each family, and texts of random words for them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from helpers.families import FAMILIES
from knn_moe import BuildConfig

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


TEXTS = make_texts(12)
