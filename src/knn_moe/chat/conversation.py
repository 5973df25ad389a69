"""What was said so far, as the model reads it: by its chat template, or as one text.

Knows tokenizers and the length of a context; nothing of models or memories.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from torch import Tensor

from knn_moe.errors import ConfigError


@dataclass(frozen=True)
class Turn:
    """A message and the reply to it."""

    message: str
    reply: str


@dataclass(frozen=True)
class Prompt:
    """What the model is to continue: inputs [1, T], and the turns that had to go for it."""

    inputs: dict[str, Tensor]
    dropped: int = 0

    @property
    def tokens(self) -> int:
        """T."""
        return self.inputs["input_ids"].shape[-1]


@dataclass
class Conversation:
    """The turns of a conversation, oldest first.

    A model without a chat template reads messages and replies as one text, a line for each turn.
    """

    tokenizer: Any
    turns: list[Turn] = field(default_factory=list)

    @property
    def has_template(self) -> bool:
        """Whether the model's own chat template is used."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def prompt(self, message: str, limit: int | None, reserved: int) -> Prompt:
        """Return what the model reads to answer `message`. Forget the oldest turns for it where
        the context is too short.

        Args:
            message: The next message.
            limit: The most tokens that the model can read; None: any number.
            reserved: Tokens that are kept free for the reply, as far as dropping turns helps.

        Raises:
            ConfigError: The message alone is too long or has no tokens, or the template refuses it.
        """
        for dropped in range(len(self.turns) + 1):
            kept = self.turns[dropped:]
            prompt = Prompt(self._encode(kept, message), dropped)
            if limit is None or prompt.tokens + reserved <= limit or not kept:
                break
        if limit is not None and prompt.tokens > limit:
            raise ConfigError(
                f"The message has {prompt.tokens:,} tokens, and the model reads at most "
                f"{limit:,}. Write a shorter one."
            )
        if not prompt.tokens:
            raise ConfigError("The message has no tokens. Write a longer one.")
        self.turns = kept
        return prompt

    def _encode(self, turns: list[Turn], message: str) -> dict[str, Tensor]:
        if not self.has_template:
            lines = [*(turn.message + turn.reply for turn in turns), message]
            encoded = self.tokenizer("\n".join(lines), return_tensors="pt")
        else:
            said = [
                {"role": role, "content": content}
                for turn in turns
                for role, content in (("user", turn.message), ("assistant", turn.reply))
            ]
            try:
                encoded = self.tokenizer.apply_chat_template(
                    [*said, {"role": "user", "content": message}],
                    add_generation_prompt=True,
                    return_tensors="pt",
                    return_dict=True,
                )
            except TemplateError as error:
                raise ConfigError(f"The model's chat template refuses this: {error}.") from None
        return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}
