"""Clients of a server, each in a thread of its own: they ask, read streams and note times.

Knows HTTP; nothing of models.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_TIMEOUT: Final = 600.0  # seconds without a word of the server


@dataclass(frozen=True, kw_only=True)
class Load:
    """What clients ask for."""

    clients: int = 64  # each has one request at a time
    prompt: int = 32  # tokens
    tokens: int = 64  # of an answer


@dataclass(frozen=True)
class Answer:
    """The times of one answer, in seconds since it was asked for."""

    first: float  # until its first token
    whole: float


@dataclass
class Answered:
    """What clients got."""

    seconds: float = 0.0  # in which requests were made
    tokens: int = 0  # that came in this time
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, other: Answered) -> None:
        """Add what was got in another time."""
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.answers += other.answers
        self.errors += other.errors


def ask_many(
    port: int, names: Sequence[str], vocabulary: int, load: Load, seconds: float
) -> Answered:
    """Let clients ask a server for some time. Requests that run then are waited for, and their
    tokens that come later do not count.

    Args:
        port: The server's, on this machine.
        names: The models that requests name, one after the other.
        vocabulary: Prompts are random tokens below this number.
        load: What they ask for.
        seconds: In which requests are made.
    """
    got = Answered(seconds=seconds)
    ends = time.monotonic() + seconds
    lock = threading.Lock()
    clients = [
        threading.Thread(target=_ask, args=(number, port, names, vocabulary, load, ends, got, lock))
        for number in range(load.clients)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return got


def _ask(
    number: int,
    port: int,
    names: Sequence[str],
    vocabulary: int,
    load: Load,
    ends: float,
    got: Answered,
    lock: threading.Lock,
) -> None:
    draw = random.Random(number)
    turn = number
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    while time.monotonic() < ends:
        prompt = [draw.randrange(3, vocabulary) for _ in range(load.prompt)]
        body = {
            "model": names[turn % len(names)], "prompt": prompt, "max_tokens": load.tokens,
            "temperature": 0, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        turn += 1
        try:
            answer, counted = _answer(connection, body, ends)
        except (OSError, http.client.HTTPException, _FailedError) as error:
            connection.close()
            with lock:
                got.errors.append(str(error) or type(error).__name__)
            return  # a server that fails is not asked in a loop
        with lock:
            got.answers.append(answer)
            got.tokens += counted
    connection.close()


class _FailedError(Exception):
    """A request was refused, or its answer ended with an error."""


def _answer(
    connection: http.client.HTTPConnection, body: dict[str, Any], ends: float
) -> tuple[Answer, int]:
    """Return the times of an answer, and how many of its tokens came before `ends`."""
    started = time.monotonic()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise _FailedError(_error_of(json.loads(response.read())))
    first, counted = None, 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise _FailedError(_error_of(chunk))
        tokens = sum(len(choice["token_ids"]) for choice in chunk["choices"])
        now = time.monotonic()
        if tokens:
            first = now if first is None else first
            counted += tokens if now <= ends else 0
    response.read()  # its end, so that the connection can be used again
    now = time.monotonic()
    return Answer((first or now) - started, now - started), counted


def _error_of(body: Any) -> str:
    return str(body["error"]["message"])
