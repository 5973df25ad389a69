"""Explanations of finished answers: what a memory changed at each token, and one token in full.

One is made at a time, and some wait. Knows the engine, token ids and asyncio; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

from knn_moe.errors import StoppedError, UnknownMemoryError
from knn_moe.explain.explanation import ExplainedToken
from knn_moe.explain.reader import colour, show_place, summarise
from knn_moe.serve.answering import Limits
from knn_moe.serve.engine import Engine
from knn_moe.serve.refused import RefusedError
from knn_moe.serve.requests import AskedExplanation

_AT_ONCE: Final = 16  # that is made, and those that wait for it


class Explaining:
    """Makes explanations, one after the other.

    Args:
        engine: Reads texts.
        tokenizer: The model's.
        limits: How long a text may be, and how long it may take.
    """

    def __init__(self, engine: Engine, tokenizer: Any, limits: Limits) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="explain")
        self._taken: list[Future[dict[str, Any]]] = []

    async def explain(self, asked: AskedExplanation, memory: str) -> dict[str, Any]:
        """Return an explanation. One that nobody waits for any more is not begun.

        Raises:
            RefusedError: The text is too long, too many wait, or it takes too long.
        """
        self._check_length(len(asked.prompt) + len(asked.answer))
        self._taken = [one for one in self._taken if not one.done()]
        if len(self._taken) >= _AT_ONCE:
            raise RefusedError(
                f"{len(self._taken)} explanations wait already. Try again later.",
                status=429,
                code="too_many_requests",
            )
        made = self._worker.submit(self._explain, asked, memory)
        self._taken.append(made)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(made), self._limits.seconds)
        except TimeoutError:
            raise RefusedError(
                f"The explanation took longer than {self._limits.seconds:g} seconds.",
                status=504,
                code="timeout",
            ) from None

    def _check_length(self, length: int) -> None:
        most = self._limits.explained
        if not most:
            raise RefusedError(
                "This server does not explain answers (--max-explained 0).",
                status=403,
                code="explanations_off",
            )
        most = min(most, self._engine.context)
        if length > most:
            raise RefusedError(
                f"The prompt and its answer have {length:,} tokens, and this server explains at "
                f"most {most:,}. Shorten them.",
                param="token_ids",
                code="context_length_exceeded",
            )

    def _explain(self, asked: AskedExplanation, memory: str) -> dict[str, Any]:
        """Explain in this thread."""
        make = self._explain_all if asked.token is None else self._explain_one
        try:
            return {"model": asked.model, **make(asked, memory)}
        except UnknownMemoryError as error:
            raise RefusedError(str(error), status=404, code="model_not_found") from None
        except StoppedError as error:
            raise RefusedError(str(error), status=503, code="stopping") from None
        except Exception as error:  # of a model
            message = f"{type(error).__name__}: {error}"
            raise RefusedError(message, status=500, code="engine_error") from None

    def _explain_all(self, asked: AskedExplanation, memory: str) -> dict[str, Any]:
        """Tell what the memory changed at each token of the answer, without cases.

        A token is told with what led to it: what was recalled at the token before.
        """
        ids = [*asked.prompt, *asked.answer]
        first = len(asked.prompt) - 1
        tokens = self._engine.explain(memory, ids, first, self._tokenizer, cases=False)
        return {
            "layers": [effect.layer for effect in tokens[0].effects],
            "summary": summarise(tokens[:-1]),
            "tokens": _tell_tokens(tokens),
        }

    def _explain_one(self, asked: AskedExplanation, memory: str) -> dict[str, Any]:
        """Tell everything of one token, as pages show it (explain/reader.py); behind the last one
        comes what may follow."""
        assert asked.token is not None
        ids = [*asked.prompt, *asked.answer[: asked.token + 1]]
        first = len(asked.prompt) + asked.token - 1
        tokens = self._engine.explain(memory, ids, first, self._tokenizer)
        return {"token": asked.token, "before": tokens[0].text, **show_place(tokens[0])}


def _tell_tokens(tokens: Sequence[ExplainedToken]) -> list[dict[str, Any]]:
    told = []
    for before, token in pairwise(tokens):
        came = before.following
        told.append(
            {
                "id": token.id,
                "text": token.text,
                "alone": None if came is None else _finite(came.alone),
                "with_memory": None if came is None else _finite(came.with_memory),
                "colour": 0 if came is None else colour(*came.losses),
                "confidence": _finite(before.confidence),
                "rerouted": before.changed,
            }
        )
    return told


def _finite(value: float) -> float | None:
    """Return a number that JSON has. A model that has diverged gives NaN."""
    return value if math.isfinite(value) else None
