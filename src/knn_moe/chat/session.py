"""A chat: the conversation, the memory in use, and the replies.

Knows a model and the memories on it. What is shown, and what a line of input means, is
cli/chat.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from knn_moe.chat.conversation import Conversation, Prompt, Turn
from knn_moe.errors import ConfigError
from knn_moe.explain.explanation import Explanation
from knn_moe.inference.several import Memories
from knn_moe.inference.streaming import Reply, Sampling, context_length, stream_reply
from knn_moe.routers.model_state import input_device
from knn_moe.support.registry import unknown_name


@dataclass(frozen=True)
class _Last:
    """The last reply, and the memory that it was made with."""

    reply: Reply
    memory: str | None


class Session:
    """A conversation with a model, which any of its memories may take part in.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        routing: The memories that are attached to it, or None. The first one is in use.
        sampling: How tokens are drawn.
        pad_token: Any token id; `generate` wants one.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        routing: Memories | None,
        sampling: Sampling,
        pad_token: int,
    ) -> None:
        self.conversation = Conversation(tokenizer)
        self.memory: str | None = next(iter(routing.memories)) if routing else None
        self._model = model
        self._tokenizer = tokenizer
        self._routing = routing
        self._sampling = sampling
        self._pad_token = pad_token
        self._last: _Last | None = None

    @property
    def memories(self) -> Sequence[str]:
        """The names of all memories."""
        return list(self._routing.memories) if self._routing else []

    def use(self, name: str | None) -> None:
        """Use the memory `name` from the next reply on; None: the model alone.

        Raises:
            ConfigError: There is no memory of such a name.
        """
        if name is not None:
            self.check_memories()
            if name not in self.memories:
                raise ConfigError(unknown_name("memory", name, self.memories))
        self.memory = name

    def check_memories(self) -> None:
        """Raise ConfigError if there are none."""
        if not self.memories:
            raise ConfigError("There is no memory. Name one at the start, with --memory.")

    def prompt(self, message: str) -> Prompt:
        """Return what the model reads to answer `message`. The oldest turns may go for it.

        Raises:
            ConfigError: The message is too long, or empty.
        """
        limit = context_length(self._model)
        reserved = min(self._sampling.max_new_tokens, (limit or 0) // 4)
        return self.conversation.prompt(message, limit, reserved)

    def generate(self, prompt: Prompt, memory: str | None, reply: Reply) -> None:
        """Generate into `reply`, with a memory or by the model alone."""
        device = input_device(self._model)
        inputs = {name: tensor.to(device) for name, tensor in prompt.inputs.items()}
        with self._routing.using(memory) if self._routing else nullcontext():
            stream_reply(self._model, inputs, reply, self._sampling, self._pad_token)

    def keep(self, message: str, reply: Reply) -> None:
        """Make a message and its reply, also an interrupted one, part of the conversation."""
        self.conversation.turns.append(Turn(message, reply.text))
        self._last = _Last(reply, self.memory)

    def reset(self) -> None:
        """Forget the conversation; the memories stay."""
        self.conversation.turns.clear()
        self._last = None

    def explain(self) -> tuple[Explanation, str]:
        """Explain the tokens of the last reply, from the one before it on, and name its memory.

        Raises:
            ConfigError: There is no reply, or no memory took part in it.
        """
        last = self._last
        if last is None or not last.reply.ids:
            raise ConfigError("There is no reply to explain yet.")
        if last.memory is None or self._routing is None:
            raise ConfigError("The last reply was by the model alone: there is nothing to explain.")
        ids = torch.tensor([*last.reply.prompt, *last.reply.ids])
        explanation = self._routing.explain(
            last.memory, ids, tokenizer=self._tokenizer, last=len(last.reply.ids) + 1
        )
        return explanation, last.memory
