"""Answers in OpenAI's form: whole ones, and the chunks of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from knn_moe.serve.answering import Answering
from knn_moe.serve.text import Piece, Placed, token_bytes, token_text

_LEAST: Final = -9999.0  # in place of -inf, which JSON does not have


class Formatter:
    """Writes the answers to one request.

    Args:
        answering: The request.
        tokenizer: The model's, for the texts of tokens.
    """

    def __init__(self, answering: Answering, tokenizer: Any) -> None:
        self._answering = answering
        self._tokenizer = tokenizer
        self._chat = answering.asked.chat
        self._tells = answering.asked.sampling.logprobs is not None
        self._tells_ids = answering.asked.token_ids

    def whole(self, pieces: Sequence[tuple[int, Piece]]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = []
        for index in range(self._answering.asked.choices):
            mine = [piece for place, piece in pieces if place == index]
            text = "".join(piece.text for piece in mine)
            tokens = [token for piece in mine for token in piece.tokens]
            content: dict[str, Any] = {"text": text, **self._prompt_ids(index)}
            if self._chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(self._choice(index, content, tokens, mine[-1].reason))
        kind = "chat.completion" if self._chat else "text_completion"
        more = self._prompt_ids(0) if self._chat else {}
        return self._envelope(kind, choices, usage=self.usage(), **more)

    def first(self) -> list[dict[str, Any]]:
        """Return the chunks that begin a stream: of a chat, the role of each answer; and the ids
        of prompts, if they were asked for."""
        choices = range(self._answering.asked.choices)
        if self._chat:
            delta = {"delta": {"role": "assistant", "content": ""}}
            prompt = self._prompt_ids(0)
            return [self._chunk([self._choice(at, delta, [], None)]) | prompt for at in choices]
        if not self._tells_ids:
            return []
        prompts = [{"text": "", **self._prompt_ids(index)} for index in choices]
        return [self._chunk([self._choice(at, prompts[at], [], None)]) for at in choices]

    def chunk(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Return the chunk of a piece; None: there is nothing to tell."""
        tells = self._tells or self._tells_ids
        if not (piece.text or piece.reason or (piece.tokens and tells)):
            return None
        content: dict[str, Any] = {"text": piece.text}
        if self._chat:
            content = {"delta": {"content": piece.text} if piece.text else {}}
        return self._chunk([self._choice(index, content, piece.tokens, piece.reason)])

    def last(self) -> dict[str, Any] | None:
        """Return the chunk that ends a stream, with the usage; None: it was not asked for."""
        if not self._answering.asked.include_usage:
            return None
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens so far."""
        read, made = self._answering.prompt_tokens, self._answering.completion_tokens
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = {"usage": None} if self._answering.asked.include_usage else {}
        return self._envelope(kind, choices, **usage)

    def _envelope(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._answering.id,
            "object": kind,
            "created": self._answering.created,
            "model": self._answering.asked.model,
            "choices": choices,
            **more,
        }

    def _choice(
        self, index: int, content: dict[str, Any], tokens: Sequence[Placed], reason: str | None
    ) -> dict[str, Any]:
        told = self._logprobs(tokens) if self._tells and (tokens or reason) else None
        ids = {"token_ids": [one.token.id for one in tokens]} if self._tells_ids else {}
        return {"index": index, **content, "logprobs": told, "finish_reason": reason, **ids}

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """Return the ids of an answer's prompt, if they were asked for: as vLLM, with the choice
        of a completion, and beside the choices of a chat."""
        if not self._tells_ids:
            return {}
        return {"prompt_token_ids": list(self._answering.jobs[index].prompt)}

    def _logprobs(self, tokens: Sequence[Placed]) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._told(placed) for placed in tokens], "refusal": None}
        texts = [token_text(self._tokenizer, placed.token.id) for placed in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(placed.token.logprob) for placed in tokens],
            "top_logprobs": [self._top(placed) for placed in tokens],
            "text_offset": [placed.offset for placed in tokens],
        }

    def _top(self, placed: Placed) -> dict[str, float]:
        """Return the likeliest tokens by their texts. Of two with one text the likelier counts."""
        top: dict[str, float] = {}
        for id, value in placed.token.top:
            top.setdefault(token_text(self._tokenizer, id), _finite(value))
        return top

    def _told(self, placed: Placed) -> dict[str, Any]:
        top = [self._entry(id, value) for id, value in placed.token.top]
        return self._entry(placed.token.id, placed.token.logprob) | {"top_logprobs": top}

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": token_text(self._tokenizer, id),
            "bytes": token_bytes(self._tokenizer, id),
            "logprob": _finite(logprob),
        }


def _finite(logprob: float | None) -> float:
    """Return a number that JSON has. A model that has diverged gives NaN."""
    return logprob if logprob is not None and logprob >= _LEAST else _LEAST
