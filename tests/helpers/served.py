"""A server in this process, and memories for it that change what a model says."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openai import OpenAI

from knn_moe import BuildConfig, Example, RoutingMemory, build_memory
from knn_moe.errors import ServeError
from knn_moe.serve.engine import Engine, EngineConfig
from knn_moe.serve.server import open_socket, run_server
from knn_moe.serve.service import Service, ServiceConfig, end_tokens

PROBES = [[5, 9, 33], [8, 3, 77, 21, 90]]
TEXTS = {
    "medicine": "A fever is a rise in the temperature of the body. He gave the old man water.",
    "law": "The court held that the contract was void. A judge may set the sale of land aside.",
}


def two_memories(model: Any, tokenizer: Any) -> dict[str, RoutingMemory]:
    """Build memories whose steps are so large that they change what the model says."""
    config = BuildConfig(learning_rate=200.0, steps=3, batch_tokens=512)
    return {
        name: build_memory(model, tokenizer, _shuffled(text), config)
        for name, text in TEXTS.items()
    }


def _shuffled(text: str) -> list[Example]:
    """Six orders of the words, each with another word first: equal beginnings would be equally
    near."""
    draw = random.Random(0)
    words = text.split()
    texts = []
    for first in list(dict.fromkeys(words))[:6]:
        rest = words.copy()
        rest.remove(first)
        draw.shuffle(rest)
        texts.append(Example(completion=" ".join([first, *rest])))
    return texts


def make_service(
    model: Any,
    tokenizer: Any,
    memories: dict[str, RoutingMemory],
    engine: EngineConfig | None = None,
    **config: Any,
) -> Service:
    """Make a service of a model, called "base", and its memories."""
    made = Engine(model, engine or EngineConfig(), PROBES)
    words = model.get_input_embeddings().num_embeddings
    ends = end_tokens(model, tokenizer)
    service = Service(made, tokenizer, ends, words, ServiceConfig(**{"name": "base", **config}))
    for name, memory in memories.items():
        service.load(name, memory)
    return service


@dataclass
class Served:
    """A server that runs."""

    service: Service
    port: int
    drain: Callable[[], None]
    error: ServeError | None = None  # that it ended with

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def client(self) -> OpenAI:
        """The official client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60)


@contextmanager
def served(service: Service) -> Iterator[Served]:
    """Serve in a thread of this process, and drain in the end."""
    taken = open_socket("127.0.0.1", 0)
    ready: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        try:
            run_server(service, taken, ready.put)
        except ServeError as error:
            running.error = error
        finally:
            ready.put(None)

    running = Served(service, taken.getsockname()[1], lambda: None)
    thread = threading.Thread(target=run)
    thread.start()
    running.drain = ready.get(timeout=60)
    try:
        yield running
    finally:
        running.client.close()
        with suppress(RuntimeError):  # it has ended by itself
            running.drain()
        thread.join(timeout=60)
        assert not thread.is_alive()
