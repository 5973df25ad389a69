"""A model's own answers to prompts, and its confidence in them.

Knows models and batches; nothing of which answers are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from knn_moe.errors import LabelError
from knn_moe.labels.config import LabelConfig
from knn_moe.reference.examples import Example, tokenise
from knn_moe.routers.model_state import input_device, max_positions
from knn_moe.support.progress import OnProgress, Progress
from knn_moe.tasks.generation import generate_tokens
from knn_moe.tasks.likelihood import mean_losses


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    config: LabelConfig,
    on_progress: OnProgress,
) -> list[list[str]]:
    """Generate `config.answers_per_prompt` answers to each prompt.

    torch's global generator is left as it was.

    Args:
        prompts: Token ids.
        config: How to answer.
        on_progress: Called after each batch, with the prompts done.

    Raises:
        LabelError: A prompt has no tokens, or too many for the model.
    """
    _check_lengths(model, prompts, config)
    answers: list[list[str]] = [[] for _ in prompts]
    done, count = 0, config.answers_per_prompt
    temperature = config.temperature if count > 1 else 0.0
    device = input_device(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        for places in _batch_by_length(prompts, max(1, config.batch_size // count)):
            batch = [prompts[place] for place in places]
            generated = generate_tokens(
                model,
                tokenizer,
                batch,
                config.max_new_tokens,
                samples=count,
                temperature=temperature,
            )
            for row, ids in enumerate(generated.tolist()):
                place = places[row // count]
                text = _decode_after(tokenizer, prompts[place], ids)
                answers[place].append(text.split(config.stop)[0] if config.stop else text)
            done += len(places)
            on_progress(Progress("answering", done, len(prompts)))
    return answers


def score_confidence(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    batch_size: int,
    on_progress: OnProgress,
) -> list[float]:
    """Return the mean log-probability of each completion's tokens.

    Args:
        examples: Prompts with completions, tokenised as for a memory.
        batch_size: Examples for each forward pass.
        on_progress: Called after each batch.
    """
    tokens = [tokenise(example, tokenizer) for example in examples]
    scores = [0.0] * len(examples)
    done = 0
    for places in _batch_by_length([each.ids for each in tokens], batch_size):
        batch = [tokens[place] for place in places]
        begin = [min(each.completion_start, len(each.ids) - 1) for each in batch]
        losses = mean_losses(model, [each.ids for each in batch], begin)
        for place, loss in zip(places, losses.tolist(), strict=True):
            scores[place] = -loss
        done += len(places)
        on_progress(Progress("scoring", done, len(examples)))
    return scores


def _batch_by_length(texts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Yield indices of texts of similar length, the longest first: it is the one to run out of
    memory."""
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _decode_after(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Decode tokens behind their prompt: some tokenizers drop a space at the beginning."""
    before: str = tokenizer.decode(prompt, skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _check_lengths(model: Any, prompts: Sequence[Sequence[int]], config: LabelConfig) -> None:
    most = max_positions(model)
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise LabelError(f"Prompt {number} has no tokens.")
        if most is not None and len(prompt) + config.max_new_tokens > most:
            raise LabelError(
                f"Prompt {number} has {len(prompt)} tokens. With max_new_tokens="
                f"{config.max_new_tokens} that is more than the {most} tokens the model can read. "
                f"Lower max_new_tokens, or remove the prompt."
            )
