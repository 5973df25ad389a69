"""Generate a reply token by token, and hand out its text as soon as characters are complete.

Knows a model, its tokenizer and how much the model can read; nothing of memories or terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from knn_moe.errors import ConfigError
from knn_moe.support.characters import CharacterStream


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn, and how many."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0: always the most likely token
    seed: int = 0


class Reply(BaseStreamer):
    """The tokens and the text of a reply, also of one that was interrupted.

    Args:
        tokenizer: The model's.
        on_text: Called with each piece of text.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], object]) -> None:
        self.prompt: list[int] = []
        self.ids: list[int] = []
        self.text = ""
        self._on_text = on_text
        self._characters = CharacterStream(tokenizer, skip_special_tokens=True)

    def put(self, value: Tensor) -> None:
        """Take the prompt, then each new token. Shapes: [1, T] or [1]."""
        ids = value.flatten().tolist()
        if not self.prompt:
            self.prompt = ids
            return
        for token in ids:
            self.ids.append(token)
            self._give(self._characters.push(token))

    def end(self) -> None:
        """Hand out what is left where the last token ends inside a character."""
        self._give(self._characters.finish())

    def _give(self, piece: str) -> None:
        self.text += piece
        if piece:
            self._on_text(piece)


def stream_reply(
    model: Any, inputs: Mapping[str, Tensor], reply: Reply, sampling: Sampling, pad_token: int
) -> None:
    """Generate after `inputs`, into `reply`, until the reply or the model's context ends.

    Args:
        model: The model, with or without a memory.
        inputs: Those of `generate`, for one prompt.
        reply: Takes the tokens as they come.
        sampling: How tokens are drawn.
        pad_token: Any token id; `generate` wants one.

    Raises:
        ConfigError: The prompt is longer than the model's context.
    """
    room = room_after(model, inputs["input_ids"].shape[-1])
    torch.manual_seed(sampling.seed)
    drawn: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:
        drawn = {"do_sample": True, "temperature": sampling.temperature}
    model.generate(
        **inputs,
        **drawn,
        num_beams=1,
        max_new_tokens=min(sampling.max_new_tokens, room),
        pad_token_id=pad_token,
        streamer=reply,
    )


def context_length(model: nn.Module) -> int | None:
    """Return the most tokens that `model` can read; None if it does not say."""
    config: Any = model.config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def room_after(model: nn.Module, tokens: int) -> int:
    """Return how many tokens can be generated after a prompt of `tokens`.

    The last one is not read, so that after the longest prompt there is room for one.

    Raises:
        ConfigError: The prompt is longer than the model's context.
    """
    limit = context_length(model)
    if limit is None:
        return 1 << 30
    if tokens > limit:
        raise ConfigError(
            f"The prompt has {tokens:,} tokens, and the model reads at most {limit:,}. Shorten the "
            f"prompt, or use a model with a longer context."
        )
    return limit - tokens + 1
