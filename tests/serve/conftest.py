"""A server of tiny-olmoe and two memories, for the tests of its endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from helpers.served import Served, make_service, served, two_memories
from knn_moe import RoutingMemory
from knn_moe.serve.engine import EngineConfig


@pytest.fixture(scope="module")
def memories(tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any) -> dict[str, RoutingMemory]:
    """Two memories of the embedded OLMoE."""
    return two_memories(tiny_olmoe, tiny_tokenizer)


@pytest.fixture(scope="module")
def loadable(memories: dict[str, RoutingMemory], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that memories may be loaded from: it has `law`, and beside it is `outside`."""
    folder = tmp_path_factory.mktemp("loadable")
    memories["law"].save_pretrained(folder / "memories" / "law")
    memories["law"].save_pretrained(folder / "outside")
    (folder / "memories" / "link").symlink_to(folder / "outside")
    (folder / "memories" / "empty").mkdir()
    return folder / "memories"


@pytest.fixture(scope="module")
def server(
    tiny_olmoe: PreTrainedModel,
    tiny_tokenizer: Any,
    memories: dict[str, RoutingMemory],
    loadable: Path,
) -> Iterator[Served]:
    """The server, which may load and unload memories."""
    engine = EngineConfig(at_once=16, waiting=200)
    service = make_service(tiny_olmoe, tiny_tokenizer, memories, engine, folder=loadable)
    with served(service) as running:
        yield running
