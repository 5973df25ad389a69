"""What the model reads: the token ids of a request's prompts. Knows tokenizers; nothing of HTTP."""

from __future__ import annotations

from typing import Any, TypeGuard

from jinja2 import TemplateError

from knn_moe.serve.refused import RefusedError
from knn_moe.serve.requests import Message, Prompt


class Encoder:
    """Encodes prompts.

    Args:
        tokenizer: The model's.
        vocabulary: How many token ids the model knows.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    @property
    def has_template(self) -> bool:
        """Whether the model's own chat template is used."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a text or a conversation, or the ids themselves.

        Raises:
            RefusedError: There are no tokens, unknown ones, or the chat template refuses them.
        """
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        elif _is_conversation(prompt):
            ids = self._encode_messages(prompt)
        else:
            ids = [one for one in prompt if isinstance(one, int)]
            wrong = [one for one in ids if not 0 <= one < self._vocabulary]
            if wrong:
                raise RefusedError(
                    f"Token ids are from 0 to {self._vocabulary - 1}, got {wrong[0]}.",
                    param="prompt",
                )
        if not ids:
            raise RefusedError("The prompt has no tokens. Give a longer one.", param="prompt")
        return ids

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def _encode_messages(self, messages: list[Message]) -> list[int]:
        """Use the chat template; without one, read a line for each message, as `knn-moe chat`."""
        if not self.has_template:
            text = ""
            for place, message in enumerate(messages):
                apart = place > 0 and message["role"] != "assistant"
                text += ("\n" if apart else "") + message["content"]
            return self._encode_text(text)
        if "developer" not in str(self._tokenizer.chat_template):  # a newer word for system
            messages = [
                {**one, "role": "system"} if one["role"] == "developer" else one for one in messages
            ]
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            raise RefusedError(
                f"The model's chat template refuses these messages: {error}.", param="messages"
            ) from None
        ids: list[int] = encoded["input_ids"]
        return ids


def _is_conversation(prompt: Prompt) -> TypeGuard[list[Message]]:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
