"""Try a model before it serves: whether transformers batches it rightly, and memories reach it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from knn_moe.routers.model_state import input_device
from knn_moe.serve.sampling import Token

STEPS: Final = 3  # tokens that are generated after each prompt
_TOLERANCES: Final = {torch.float32: 0.02}  # of log-probabilities
_COARSE: Final = 0.25  # of any other precision
# Prompts → the tokens that are generated after each, all at the same time, with log-probabilities.
Answer: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[Token]]]


@torch.no_grad()
def read_alone(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Return the log-probabilities of `STEPS` greedy tokens after each prompt, each [V], from
    whole passes over one sequence."""
    found = []
    for prompt in prompts:
        ids, steps = list(prompt), []
        for _ in range(STEPS):
            read = torch.tensor([ids], device=input_device(model))
            logits = model(read, use_cache=False).logits[0, -1]
            steps.append(logits.float().log_softmax(-1).cpu())
            ids.append(int(steps[-1].argmax()))
        found.append(steps)
    return found


def find_difference(
    alone: Sequence[Sequence[Tensor]], batched: Sequence[Sequence[Token]], dtype: torch.dtype
) -> str | None:
    """Say how a batch's answers differ from those of the model alone; None: they do not.

    The median counts: where experts are nearly tied, rounding alone may move some of them.
    """
    differences = []
    for steps, tokens in zip(alone, batched, strict=True):
        for logprobs, token in zip(steps, tokens, strict=True):
            assert token.logprob is not None
            differences.append(abs(float(logprobs[token.id]) - token.logprob))
            if token.id != int(logprobs.argmax()):
                break  # a near tie, or a large difference: what follows is another text
    typical = median(differences)
    if typical <= _TOLERANCES.get(dtype, _COARSE):
        return None
    return f"in a batch its log-probabilities differ by {typical:.2g}"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from logging inside: what fails here is told in our words."""
    logger = logging.getLogger("transformers")
    names = [name for name in logging.root.manager.loggerDict if "ontinuous" in name]
    loggers = [logger, *map(logging.getLogger, names)]
    before = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.CRITICAL)
        yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
