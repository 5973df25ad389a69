"""Memories come and go while a server runs, only where that is allowed; and the metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from helpers.served import Served, make_service, served
from helpers.tiny import trained
from knn_moe import RoutingMemory
from knn_moe.errors import ConfigError


def post(server: Served, path: str, **body: Any) -> tuple[int, Any]:
    answer = httpx2.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    return answer.status_code, answer.json()


def names(server: Served) -> list[str]:
    return [model.id for model in server.client.models.list()]


def text_of(server: Served, model: str) -> str:
    options: Any = {"model": model, "prompt": "A fever is", "max_tokens": 8, "temperature": 0}
    return server.client.completions.create(**options).choices[0].text


def test_a_memory_comes_and_goes(server: Served) -> None:
    status, card = post(server, "load_memory", name="another", folder="law")
    assert (status, card["parent"]) == (200, "base")
    assert names(server) == ["base", "medicine", "law", "another"]
    assert text_of(server, "another") == text_of(server, "law")
    status, answer = post(server, "load_memory", name="another", folder="law")
    assert (status, "already" in answer["error"]["message"]) == (400, True)
    assert post(server, "unload_memory", name="another")[0] == 200
    assert names(server) == ["base", "medicine", "law"]
    assert post(server, "unload_memory", name="another")[0] == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"name": "x", "folder": "none"}, 404, "There is no folder 'none'"),
        ({"name": "x", "folder": "empty"}, 400, "'empty' is not a memory"),
        ({"name": "x", "folder": "../outside"}, 400, "not a folder inside"),
        ({"name": "x", "folder": "link"}, 400, "not a folder inside"),
        ({"name": "x", "folder": "/etc"}, 400, "not a folder inside"),
        ({"name": "x", "folder": "."}, 400, "not a folder inside"),
        ({"name": "x", "folder": ""}, 400, "not a folder inside"),
        ({"name": "x", "folder": "a\0b"}, 400, "must be a text"),
        ({"name": "x", "folder": "a" * 5000}, 400, "not a folder inside"),
        ({"name": "base", "folder": "law"}, 400, "the name of the model"),
        ({"name": "a b", "folder": "law"}, 400, "letters, digits"),
        ({"name": "x"}, 400, "'name' and 'folder'"),
        ({"name": "x", "folder": 1}, 400, "must be a text"),
    ],
)
def test_what_cannot_be_loaded(
    server: Served, loadable: Path, body: dict[str, Any], status: int, words: str
) -> None:
    found, answer = post(server, "load_memory", **body)
    message = answer["error"]["message"]
    assert (found, words in message) == (status, True), message
    assert str(loadable) not in message
    assert names(server) == ["base", "medicine", "law"]


def test_loading_must_be_allowed(tiny_tokenizer: Any, memories: dict[str, RoutingMemory]) -> None:
    service = make_service(trained("tiny-olmoe"), tiny_tokenizer, {"law": memories["law"]})
    with pytest.raises(ConfigError, match="the name of the model"):
        service.load("base", memories["law"])
    with served(service) as server:
        for path, body in (
            ("load_memory", {"name": "x", "folder": "law"}),
            ("unload_memory", {"name": "law"}),
        ):
            status, answer = post(server, path, **body)
            assert (status, "--allow-loading" in answer["error"]["message"]) == (403, True)
        assert names(server) == ["base", "law"]


def read_metrics(server: Served) -> dict[str, float]:
    lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_metrics(server: Served) -> None:
    before = read_metrics(server)
    text_of(server, "law")
    post(server, "completions", model="made up", prompt="x")
    after = read_metrics(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    law = '{model="law"}'
    assert grown('knn_moe_requests_total{model="law",reason="answered"}') == 1
    assert grown(f"knn_moe_prompt_tokens_total{law}") == 4
    assert grown(f"knn_moe_generated_tokens_total{law}") == 8
    for name in ("queue_seconds", "time_to_first_token_seconds", "request_seconds"):
        assert grown(f"knn_moe_{name}_count{law}") == 1
    layers = len(server.service.engine.stats()["law"])
    assert grown(f"knn_moe_routed_tokens_total{law}") == layers * (4 + 7)
    assert 0 < after[f"knn_moe_mean_confidence{law}"] <= 1
    assert 0 < after[f"knn_moe_rerouted_share{law}"] <= 1
    assert grown('knn_moe_refused_requests_total{status="404"}') == 1
    assert not any(re.search("made up", name) for name in after)
    assert (after["knn_moe_running_answers"], after["knn_moe_waiting_answers"]) == (0, 0)
