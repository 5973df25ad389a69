"""The service: the names of a model and its memories, its limits, and what becomes of a request.

Knows tokenizers and the engine; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from knn_moe.errors import (
    ConfigError,
    KnnMoeError,
    StoppedError,
    UnknownMemoryError,
)
from knn_moe.memory.memory import RoutingMemory
from knn_moe.serve.answering import Answering, Limits
from knn_moe.serve.engine import Engine
from knn_moe.serve.explaining import Explaining
from knn_moe.serve.metrics import Metrics
from knn_moe.serve.prompts import Encoder
from knn_moe.serve.refused import RefusedError
from knn_moe.serve.requests import Asked, AskedExplanation
from knn_moe.support.registry import unknown_name

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}")
_USUAL_TOKENS: Final = 16  # of a completion that does not say how many, as OpenAI's


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """What is served, and how.

    Args:
        name: The name of the model without a memory.
        limits: What one request may take.
        api_key: What clients must send; None: nothing.
        folder: Where memories may be loaded from at run time; None: nowhere.
        neighbours: K of all memories; None: as each says.
        force: Also use memories that were built for another model of the same shape.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    folder: Path | None = None
    neighbours: int | None = None
    force: bool = False


class Service:
    """What answers requests.

    Args:
        engine: Runs them.
        tokenizer: The model's.
        ends: The tokens that end an answer.
        vocabulary: How many token ids the model knows.
        config: What is served, and how.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        ends: frozenset[int],
        vocabulary: int,
        config: ServiceConfig,
    ) -> None:
        check_name(config.name)
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.encoder = Encoder(tokenizer, vocabulary)
        self.metrics = Metrics(engine, config.name)
        self.draining = False
        self._explaining = Explaining(engine, tokenizer, config.limits)
        self._ends = ends
        self._created = {config.name: int(time.time())}

    # Models

    def models(self) -> list[dict[str, Any]]:
        """Return the model and its memories, as OpenAI lists models."""
        names = [self.config.name, *self.engine.memories]
        return [self._card(name) for name in names]

    def model(self, name: str) -> dict[str, Any]:
        """Return one of them.

        Raises:
            RefusedError: There is none of this name.
        """
        self._memory_of(name)
        return self._card(name)

    def _card(self, name: str) -> dict[str, Any]:
        base = self.config.name
        return {
            "id": name,
            "object": "model",
            "created": self._created.get(name, self._created[base]),
            "owned_by": "knn-moe",
            "root": base,
            "parent": None if name == base else base,
            "max_model_len": self.engine.context,
            "has_chat_template": self.encoder.has_template,
        }

    def _memory_of(self, name: str) -> str | None:
        memories = self.engine.memories
        if name == self.config.name:
            return None
        if name not in memories:
            shown = name if len(name) <= 100 else f"{name[:100]}…"
            raise RefusedError(
                unknown_name("model", shown, [self.config.name, *memories]),
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    # Requests

    async def answering(self, asked: Asked) -> Answering:
        """Return the answers to a request, which the engine has begun.

        Raises:
            RefusedError: The request cannot be answered.
        """
        memory = self._memory_of(asked.model)
        # A long text takes a while to encode, and others must not wait for it.
        encoded = await asyncio.to_thread(lambda: [*map(self.encoder.encode, asked.prompts)])
        prompts = [(ids, self._room(asked, len(ids))) for ids in encoded]
        answering = Answering(
            asked,
            memory,
            prompts,
            self._ends,
            self.tokenizer,
            self.metrics,
            self.config.limits.seconds,
        )
        answering.submit(self.engine)
        return answering

    def _room(self, asked: Asked, length: int) -> int:
        """Return the most tokens of an answer to a prompt of `length` tokens."""
        context, most = self.engine.context, self.config.limits.tokens
        room = context - length + 1  # the last token is not read
        if room < 1:
            raise RefusedError(
                f"The prompt has {length:,} tokens, and the model reads at most {context:,}. "
                f"Shorten the prompt.",
                param="messages" if asked.chat else "prompt",
                code="context_length_exceeded",
            )
        if asked.max_tokens is None:
            usual = room if asked.chat else min(_USUAL_TOKENS, room)
            return usual if most is None else min(usual, most)
        if asked.max_tokens > room:
            raise RefusedError(
                f"The prompt has {length:,} tokens and the answer may have {asked.max_tokens:,}; "
                f"the model reads at most {context:,} in all. Ask for at most {room:,}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if most is not None and asked.max_tokens > most:
            raise RefusedError(
                f"This server generates at most {most:,} tokens for an answer, and the request "
                f"asks for {asked.max_tokens:,}.",
                param="max_tokens",
            )
        return asked.max_tokens

    async def explain(self, asked: AskedExplanation) -> dict[str, Any]:
        """Return what a memory did in an answer: see explaining.py.

        Raises:
            RefusedError: It cannot be explained.
        """
        memory = self._memory_of(asked.model)
        if memory is None:
            raise RefusedError(
                f"{asked.model!r} is the model alone, and there is nothing to explain. Name one "
                f"of its memories.",
                param="model",
            )
        started = time.monotonic()
        for ids in (asked.prompt, asked.answer):
            self.encoder.encode(ids)  # refuses unknown ones
        explained = await self._explaining.explain(asked, memory)
        self.metrics.on_explained(memory, time.monotonic() - started)
        return explained

    # Memories

    def load(self, name: str, memory: RoutingMemory) -> None:
        """Add a memory.

        Raises:
            ConfigError: The name is taken, or cannot be a name.
            AttachError, MemoryMismatchError, MemoryFormatError: As in `attach`.
        """
        check_name(name)
        if name == self.config.name:
            raise ConfigError(f"{name!r} is the name of the model. Choose another name.")
        config = memory.routing
        if self.config.neighbours is not None:
            config = replace(config, k=self.config.neighbours)
        # Counted, for the metrics.
        self.engine.load(name, memory, replace(config, stats=True), force=self.config.force)
        self._created[name] = int(time.time())

    def load_from_folder(self, name: str, place: str) -> None:
        """Add a memory from the folder that memories may be loaded from.

        Raises:
            RefusedError: That is not allowed, or it cannot be loaded.
        """
        folder = self._folder()
        try:
            wanted = (folder / place).resolve()
            inside = wanted.is_relative_to(folder.resolve()) and wanted != folder.resolve()
            there = inside and wanted.is_dir()
        except (OSError, ValueError):  # too long, or with a NUL
            inside = there = False
        if not inside or Path(place).is_absolute():
            raise RefusedError(
                f"{place!r} is not a folder inside the one that memories are loaded from.",
                param="folder",
            )
        if not there:
            raise RefusedError(f"There is no folder {place!r}.", status=404, param="folder")
        _refuse(lambda: self.load(name, RoutingMemory.from_pretrained(wanted)), place, wanted)

    def unload(self, name: str) -> None:
        """Take a memory off, when the requests that use it have ended.

        Raises:
            RefusedError: That is not allowed, or it is not loaded.
        """
        self._folder()
        _refuse(lambda: self.engine.unload(name))
        self._created.pop(name, None)

    def _folder(self) -> Path:
        if self.config.folder is None:
            raise RefusedError(
                "This server does not load or unload memories. Start it with --allow-loading.",
                status=403,
            )
        return self.config.folder


def _refuse(change: Callable[[], None], place: str = "", path: Path | None = None) -> None:
    """Make a change, or say why not in the words of a request: paths of this machine are not
    told."""
    try:
        change()
    except StoppedError as error:
        raise RefusedError(str(error), status=503) from None
    except UnknownMemoryError as error:
        raise RefusedError(str(error), status=404, param="name") from None
    except KnnMoeError as error:
        message = str(error) if path is None else str(error).replace(str(path), place)
        raise RefusedError(message) from None


def check_name(name: str) -> None:
    """Raise ConfigError if `name` cannot be the name of a model."""
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= 100 else f"{name[:100]}…"
        raise ConfigError(
            f"A name has at most 100 letters, digits and . _ : / - and begins with a letter or "
            f"digit; {shown!r} is none."
        )


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: those of the model's `generate`, or the tokenizer's."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    return frozenset(ends if isinstance(ends, list | tuple) else [] if ends is None else [ends])
