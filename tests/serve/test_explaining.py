"""`POST /v1/explain`: what `attach` and `explain` say, one at a time, and requests go on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
import torch

from helpers.served import Served, make_service, served, two_memories
from helpers.tiny import trained
from knn_moe import Explanation, RoutingMemory, attach
from knn_moe.bench.uses import distilled_memory
from knn_moe.explain.reader import colour, show_place
from knn_moe.serve import explaining
from knn_moe.serve.answering import Limits
from knn_moe.serve.engine import Engine, EngineConfig

PROMPT = "The court held that"
LONG = {"model": "law", "prompt": "A fever is", "max_tokens": 60, "temperature": 0}


@pytest.fixture(scope="module")
def answer(server: Served, tiny_tokenizer: Any) -> dict[str, Any]:
    """A question about an answer of the memory `law`, which has eight tokens."""
    body = {"model": "law", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    choice = ask(server, {**body, "return_token_ids": True}, "/v1/completions")["choices"][0]
    assert len(choice["token_ids"]) == 8
    return {"model": "law"} | {name: choice[name] for name in ("prompt_token_ids", "token_ids")}


@pytest.fixture(scope="module")
def expected(
    answer: dict[str, Any], memories: dict[str, RoutingMemory], tiny_tokenizer: Any
) -> Explanation:
    """What the same text's explanation says without a server."""
    ids = [*answer["prompt_token_ids"], *answer["token_ids"]]
    with attach(trained("tiny-olmoe"), memories["law"]) as routing:
        return routing.explain(torch.tensor(ids), tokenizer=tiny_tokenizer)


def post(server: Served, body: object, path: str = "/v1/explain") -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=body, timeout=60)


def ask(server: Served, body: object, path: str = "/v1/explain") -> dict[str, Any]:
    response = post(server, body, path)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_all_tokens_in_short(
    server: Served, answer: dict[str, Any], expected: Explanation, tiny_tokenizer: Any
) -> None:
    told = ask(server, answer)
    assert (told["model"], told["layers"]) == ("law", list(expected.layers))
    assert "".join(token["text"] for token in told["tokens"]) == tiny_tokenizer.decode(
        answer["token_ids"]
    )
    first = len(answer["prompt_token_ids"]) - 1
    for token, before in zip(told["tokens"], expected.tokens[first:-1], strict=True):
        assert before.following is not None
        assert token["id"] == before.following.id
        assert token["alone"] == pytest.approx(before.following.alone, rel=1e-3)
        assert token["with_memory"] == pytest.approx(before.following.with_memory, rel=1e-3)
        assert token["confidence"] == pytest.approx(before.confidence, rel=1e-3)
        assert token["rerouted"] == pytest.approx(before.changed)
        assert token["colour"] == colour(*before.following.losses)
    assert any(token["colour"] for token in told["tokens"])
    assert told["summary"].startswith("8 tokens. ")


@pytest.mark.parametrize("place", [0, 3, 8])
def test_one_token_in_full(
    server: Served, answer: dict[str, Any], expected: Explanation, place: int
) -> None:
    told = ask(server, {**answer, "token": place})
    before = expected.tokens[len(answer["prompt_token_ids"]) - 1 + place]
    shown = json.loads(json.dumps(show_place(before)))
    assert (told["token"], told["before"]) == (place, before.text)
    assert told["texts"] == shown["texts"]
    assert len(told["texts"]) > 1
    for found, wanted in zip(told["place"]["layers"], shown["place"]["layers"], strict=True):
        assert found[1:3] == wanted[1:3]
        assert found[0] == pytest.approx(wanted[0], abs=1)
    assert ("said" in told["place"]) == (place < 8)  # behind the answer, what may follow
    assert len(told["place"]["expected"][1]) == 5


def test_a_distilled_memory(
    server: Served,
    answer: dict[str, Any],
    memories: dict[str, RoutingMemory],
    tiny_tokenizer: Any,
) -> None:
    """Its prototypes are told as the real cases that are nearest to them."""
    small = distilled_memory(memories["law"], 8)
    ids = [*answer["prompt_token_ids"], *answer["token_ids"]]
    with attach(trained("tiny-olmoe"), small) as routing:
        explained = routing.explain(torch.tensor(ids), tokenizer=tiny_tokenizer)
    before = explained.tokens[len(answer["prompt_token_ids"]) + 2]
    server.service.load("small", small)
    try:
        told = ask(server, {**answer, "model": "small", "token": 3})
        short = ask(server, {**answer, "model": "small"})["tokens"][3]
    finally:
        server.service.engine.unload("small")
    assert told["texts"] == json.loads(json.dumps(show_place(before)))["texts"]
    assert any(row[1] for row in told["texts"])
    assert before.following is not None
    assert short["with_memory"] == pytest.approx(before.following.with_memory, rel=1e-3)


def test_requests_go_on_as_if_nothing_was_explained(server: Served, answer: dict[str, Any]) -> None:
    alone = ask(server, LONG, "/v1/completions")["choices"]
    before = server.service.engine.stats()
    texts = []
    with httpx2.Client(timeout=60) as client:
        body = {**LONG, "stream": True}
        with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            for number, line in enumerate(response.iter_lines()):
                if line.startswith("data: {"):
                    texts.append(json.loads(line[6:])["choices"][0]["text"])
                if number % 20 == 0:
                    ask(server, {**answer, "model": "medicine", "token": 2})
    assert "".join(texts) == alone[0]["text"]
    after = server.service.engine.stats()
    assert after["law"][0].tokens > before["law"][0].tokens
    assert after["medicine"] == before["medicine"]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "base"}, 400, "'base' is the model alone"),
        ({"model": "lew"}, 404, "Did you mean 'law'"),
        ({"model": None}, 400, "'model' must be a text"),
        ({"token_ids": []}, 400, "'token_ids' must be a list of token ids"),
        ({"token_ids": [1.5]}, 400, "'token_ids' must be a list of token ids"),
        ({"prompt_token_ids": "A"}, 400, "'prompt_token_ids' must be a list of token ids"),
        ({"prompt_token_ids": [1 << 40]}, 400, "Token ids are from 0 to"),
        ({"prompt_token_ids": [5] * 1100}, 400, "explains at most 1,024"),
        ({"token": 9}, 400, "'token' must be a whole number from 0 to 8"),
        ({"token": True}, 400, "'token' must be a whole number"),
        ({"tokens": 1}, 400, "Unknown field 'tokens'. Did you mean 'token'?"),
    ],
)
def test_wrong_requests(
    server: Served, answer: dict[str, Any], change: dict[str, Any], status: int, words: str
) -> None:
    response = post(server, answer | change)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert post(server, [answer]).status_code == 400


def wait_for(server: Served, happened: Callable[[], bool]) -> None:
    """Ask the server small questions until something has happened."""
    for _ in range(5000):
        if happened():
            return
        httpx2.get(f"{server.url}/health")
    raise AssertionError("It did not happen.")


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Any], threading.Event]]:
    """Keep explanations from ending inside: the calls that have begun, and what lets them end."""
    begun: list[Any] = []
    go_on, real = threading.Event(), Engine.explain

    def wait(engine: Engine, *arguments: Any, **options: Any) -> Any:
        begun.append(arguments)
        assert go_on.wait(timeout=60)
        return real(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "explain", wait)
    try:
        yield begun, go_on
    finally:
        go_on.set()


def test_one_is_made_at_a_time_and_few_wait(
    server: Served, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = explaining._AT_ONCE
    statuses: list[int] = []
    with held(monkeypatch) as (begun, go_on):
        threads = [
            threading.Thread(target=lambda: statuses.append(post(server, answer).status_code))
            for _ in range(most + 1)
        ]
        for thread in threads:
            thread.start()
        wait_for(server, lambda: 429 in statuses)  # the one that finds all places taken
        assert len(begun) == 1
        assert ask(server, LONG, "/v1/completions")["choices"]  # others are answered
        go_on.set()
        for thread in threads:
            thread.join(timeout=60)
    assert sorted(statuses) == [200] * most + [429]
    assert len(begun) == most


def test_what_nobody_waits_for_is_not_begun(
    server: Served, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = server.service._explaining
    with held(monkeypatch) as (begun, go_on):
        first = threading.Thread(target=post, args=(server, answer))
        first.start()
        wait_for(server, lambda: bool(begun))
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(f"{server.url}/v1/explain", json=answer, timeout=0.2)
        wait_for(server, lambda: any(made.cancelled() for made in taken._taken))
        go_on.set()
        first.join(timeout=60)
        ask(server, answer)
    assert len(begun) == 2  # without the one that went away


def test_a_model_that_fails_leaves_the_server_as_it_was(
    server: Served, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of order")

    alone = ask(server, LONG, "/v1/completions")["choices"]
    with monkeypatch.context() as patch:
        patch.setattr(server.service.engine.routing, "trace", fail)
        response = post(server, answer)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "RuntimeError: out of order"
    assert ask(server, LONG, "/v1/completions")["choices"] == alone


def test_metrics(server: Served, answer: dict[str, Any]) -> None:
    def count() -> int:
        text = httpx2.get(f"{server.url}/metrics").text
        lines = [line for line in text.splitlines() if "explanation_seconds_count" in line]
        return sum(int(float(line.split()[-1])) for line in lines)

    before = count()
    ask(server, answer)
    assert count() == before + 1


@pytest.fixture(scope="module")
def narrow(tiny_tokenizer: Any) -> Iterator[Served]:
    """A server that generates one answer at a time, has a key, and explains nothing."""
    model = trained("tiny-olmoe")
    service = make_service(
        model,
        tiny_tokenizer,
        two_memories(model, tiny_tokenizer),
        EngineConfig(batched=False),
        limits=Limits(explained=0, seconds=5),
    )
    with served(service) as running:
        yield running


def test_a_server_that_explains_nothing(narrow: Served, answer: dict[str, Any]) -> None:
    response = post(narrow, answer)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "explanations_off"


def test_one_answer_at_a_time(
    narrow: Served,
    answer: dict[str, Any],
    expected: Explanation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = Limits(explained=100, seconds=60)
    monkeypatch.setattr(narrow.service._explaining, "_limits", limits)
    told = ask(narrow, answer)
    shares = [token["with_memory"] for token in told["tokens"]]
    first = len(answer["prompt_token_ids"]) - 1
    wanted = [token.following.with_memory for token in expected.tokens[first:-1] if token.following]
    assert shares == pytest.approx(wanted, rel=1e-3)


def test_time(narrow: Served, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(explained=100, seconds=0.05)
    monkeypatch.setattr(narrow.service._explaining, "_limits", limits)
    with held(monkeypatch):
        response = post(narrow, answer)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert "longer than 0.05 seconds" in response.json()["error"]["message"]


def test_a_memory_that_is_gone(
    narrow: Served, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow.service._explaining, "_limits", Limits(explained=100))
    with held(monkeypatch) as (begun, go_on):
        responses: list[httpx2.Response] = []
        asking = threading.Thread(target=lambda: responses.append(post(narrow, answer)))
        asking.start()
        wait_for(narrow, lambda: bool(begun))
        narrow.service.engine.unload("law")
        go_on.set()
        asking.join(timeout=60)
    assert responses[0].status_code == 404
    assert "'law' is not loaded" in responses[0].json()["error"]["message"]


def test_attention_that_reads_blocks_is_put_aside(
    answer: dict[str, Any],
    expected: Explanation,
    memories: dict[str, RoutingMemory],
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = trained("tiny-olmoe")
    model.set_attn_implementation("eager")
    service = make_service(model, tiny_tokenizer, {"law": memories["law"]})
    engine = service.engine
    assert engine.why_one_by_one is None
    assert model.config._attn_implementation == "paged|eager"
    ids = [*answer["prompt_token_ids"], *answer["token_ids"]]
    try:
        tokens = engine.explain("law", ids, 0, tiny_tokenizer)
        with monkeypatch.context() as patch:
            patch.setattr(engine.routing, "trace", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.explain("law", ids, 0, tiny_tokenizer)
        assert model.config._attn_implementation == "paged|eager"
    finally:
        engine.stop()
    for token, wanted in zip(tokens, expected.tokens, strict=True):
        assert token.confidence == pytest.approx(wanted.confidence, rel=1e-2)
        if token.following and wanted.following:
            assert token.following.alone == pytest.approx(wanted.following.alone, rel=1e-2)
