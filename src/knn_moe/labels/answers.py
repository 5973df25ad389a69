"""A model's own answers to prompts, and how sure it is of them.

Knows models and batches; nothing of what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from knn_moe.errors import LabelError
from knn_moe.labels.config import LabelConfig
from knn_moe.reference.examples import Example, tokenise
from knn_moe.routers.model_state import input_device, max_positions
from knn_moe.tasks.generation import generate_tokens
from knn_moe.tasks.likelihood import mean_losses

OnDone: TypeAlias = Callable[[int], None]  # prompts done so far


def answers_of(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    config: LabelConfig,
    on_done: OnDone,
) -> list[list[str]]:
    """To each prompt as many as the config asks for. Prompts of like length are asked together.

    torch's own generator is as it was before.
    """
    _check_room(model, prompts, config)
    answers: list[list[str]] = [[] for _ in prompts]
    done, count = 0, config.drawn
    temperature = config.temperature if count > 1 else 0.0
    device = input_device(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        for places in _batches(prompts, max(1, config.batch_size // count)):
            asked = [prompts[place] for place in places]
            written = generate_tokens(
                model,
                tokenizer,
                asked,
                config.max_new_tokens,
                samples=count,
                temperature=temperature,
            )
            for row, ids in enumerate(written.tolist()):
                place = places[row // count]
                text = _text(tokenizer, prompts[place], ids)
                answers[place].append(text.split(config.stop)[0] if config.stop else text)
            done += len(places)
            on_done(done)
    return answers


def confidences(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    batch_size: int,
    on_done: OnDone,
) -> list[float]:
    """The mean log-probability of each completion's tokens, as a memory of it would read them."""
    tokens = [tokenise(example, tokenizer) for example in examples]
    scores = [0.0] * len(examples)
    done = 0
    for places in _batches([each.ids for each in tokens], batch_size):
        batch = [tokens[place] for place in places]
        begin = [min(each.completion_start, len(each.ids) - 1) for each in batch]
        losses = mean_losses(model, [each.ids for each in batch], begin)
        for place, loss in zip(places, losses.tolist(), strict=True):
            scores[place] = -loss
        done += len(places)
        on_done(done)
    return scores


def _batches(texts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Places of texts of like length, the longest first: what does not fit in memory fails at
    once."""
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _text(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What the tokens say behind their prompt: some tokenizers drop a space at the beginning."""
    before: str = tokenizer.decode(prompt, skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _check_room(model: Any, prompts: Sequence[Sequence[int]], config: LabelConfig) -> None:
    room = max_positions(model)
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise LabelError(f"Prompt {number} holds no tokens.")
        if room is not None and len(prompt) + config.max_new_tokens > room:
            raise LabelError(
                f"Prompt {number} has {len(prompt)} tokens, and the model reads {room} with an "
                f"answer of max_new_tokens={config.max_new_tokens}: lower that, or leave it out."
            )
