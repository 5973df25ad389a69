"""Slow, vanished and malformed clients: clear errors, and nobody else waits."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from helpers.served import Served, make_service, served
from helpers.tiny import trained
from knn_moe.serve import guard
from knn_moe.serve.answering import Limits
from knn_moe.serve.engine import EngineConfig
from knn_moe.serve.probe import quiet_transformers

BODY = {"model": "law", "prompt": "A fever is", "max_tokens": 4, "temperature": 0}
LONG = {"model": "law", "prompt": "A fever is", "max_tokens": 900, "stream": True, "seed": 1}


def head(body: bytes, path: str = "/v1/completions", **headers: str) -> bytes:
    usual = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body))}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in {**usual, **given}.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def read_response(connection: socket.socket) -> tuple[int, Any]:
    """Read a whole response that has a length."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while line := file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = file.read(int(headers["content-length"]))
    return status, json.loads(body) if "json" in headers["content-type"] else body


def post(server: Served, body: bytes, **headers: str) -> tuple[int, Any]:
    with closing(connect(server)) as connection:
        connection.sendall(head(body, **headers) + body)
        return read_response(connection)


def assert_well(server: Served) -> None:
    """Somebody else is answered."""
    status, answer = post(server, json.dumps(BODY).encode())
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")


def wait_until_idle(server: Served) -> None:
    """Wait until no answer is generated, as the engine itself waits."""
    engine = server.service.engine
    with engine._fewer_jobs:
        assert engine._fewer_jobs.wait_for(lambda: engine.counts() == (0, 0), timeout=60)


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"", {}, 400, "no JSON"),
        (b"{", {}, 400, "no JSON"),
        (b"\xff\xfe", {}, 400, "no JSON"),
        (b"[]", {}, 400, "a JSON object"),
        (b"[" * 100_000, {}, 400, "no JSON"),
        (b'{"model": ' + b"9" * 5000 + b"}", {}, 400, "no JSON"),
        (b'{"model": "law", "prompt": "\\ud800"}', {}, 400, "half of a character"),
        (b"{}", {"Content_Type": "text/plain"}, 415, "application/json"),
        (b"{}", {"Content_Length": str(1 << 40)}, 413, "longer than 1,048,576 bytes"),
        (b" " * ((1 << 20) + 1), {}, 413, "longer than 1,048,576 bytes"),
    ],
)
def test_malformed_bodies(
    server: Served, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    found, answer = post(server, body, **headers)
    assert found == status
    assert words in answer["error"]["message"]
    assert_well(server)


def test_a_body_in_chunks_is_measured_too(server: Served) -> None:
    with closing(connect(server)) as connection:
        lines = head(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        connection.sendall(lines)
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(17):
            connection.sendall(chunk)
        assert read_response(connection)[0] == 413
    assert_well(server)


def test_no_http_at_all(server: Served) -> None:
    draw = random.Random(0)
    for _ in range(20):
        with closing(connect(server)) as connection:
            connection.sendall(draw.randbytes(200) + b"\r\n\r\n")
            connection.recv(100)
    with closing(connect(server)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000)
        connection.recv(100)
    assert_well(server)


def test_clients_that_send_slowly_or_vanish_hold_up_nobody(server: Served) -> None:
    body = json.dumps(BODY).encode()
    waiting = [connect(server) for _ in range(30)]
    for number, connection in enumerate(waiting):
        parts = (b"", b"POST /v1/comp", head(body), head(body) + body[:5])
        connection.sendall(parts[number % 4])
    assert_well(server)
    for connection in waiting:
        connection.close()
    assert_well(server)


def test_a_request_that_never_comes_whole(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.05)
    with closing(connect(server)) as connection:
        connection.sendall(head(b" " * 10) + b" ")
        status, answer = read_response(connection)
    assert status == 408
    assert "did not come within" in answer["error"]["message"]


def test_clients_that_vanish_end_their_answers(server: Served) -> None:
    body = json.dumps(LONG).encode()
    whole = json.dumps({**LONG, "stream": False}).encode()
    waiting = []
    for number in range(24):  # more than are generated at once
        connection = connect(server)
        sent = whole if number % 2 else body
        connection.sendall(head(sent) + sent)
        waiting.append(connection)
    waiting[0].recv(10)
    for connection in waiting:
        connection.close()
    assert_well(server)
    wait_until_idle(server)


def test_clients_that_do_not_read_hold_up_nobody(server: Served) -> None:
    body = json.dumps(LONG).encode()
    waiting = [connect(server) for _ in range(8)]
    for connection in waiting:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(head(body) + body)
    assert_well(server)
    for connection in waiting:
        connection.close()
    wait_until_idle(server)


def test_many_requests_of_one_connection(server: Served) -> None:
    body = json.dumps(BODY).encode()
    with closing(connect(server)) as connection:
        connection.sendall((head(body) + body) * 3)  # all before the first answer
        connection.sendall(head(b"{") + b"{")
        with connection.makefile("rb") as file:
            statuses = []
            while len(statuses) < 4:
                line = file.readline()
                if line.startswith(b"HTTP/1.1"):
                    statuses.append(int(line.split()[1]))
                elif b"HTTP/1.1" in line:  # behind a body without a new line
                    statuses.append(int(line.partition(b"HTTP/1.1 ")[2][:3]))
    assert statuses == [200, 200, 200, 400]


@pytest.fixture(scope="module")
def small(tiny_tokenizer: Any) -> Iterator[Served]:
    """A server with a key and narrow limits."""
    service = make_service(
        trained("tiny-olmoe"),
        tiny_tokenizer,
        {},
        EngineConfig(at_once=1, waiting=0),
        api_key="secret",
        limits=Limits(request_bytes=2000, tokens=800, seconds=0.2),
    )
    with served(service) as running:
        yield running


KEY = {"Authorization": "Bearer secret"}


class TestNarrowLimits:
    """Of a server that has them."""

    def test_the_key(self, small: Served) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, answer = post(small, b"{}", **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert post(small, b"{}", **KEY)[0] == 400
        with closing(connect(small)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_response(connection) == (200, {"status": "ok"})
        with closing(connect(small)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_response(connection)[0] == 401

    def test_time(self, small: Served) -> None:
        body = {"model": "base", "prompt": "A", "max_tokens": 800}
        status, answer = post(small, json.dumps(body).encode(), **KEY)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        sent = json.dumps({**body, "stream": True}).encode()
        with closing(connect(small)) as connection:
            connection.sendall(head(sent, Connection="close", **KEY) + sent)
            with connection.makefile("rb") as file:
                *_, last, done = [line for line in file if line.startswith(b"data: ")]
        assert json.loads(last[6:])["error"]["code"] == "timeout"
        assert done == b"data: [DONE]\n"

    def test_tokens_and_bytes(self, small: Served) -> None:
        body = {"model": "base", "prompt": "A", "max_tokens": 801}
        status, answer = post(small, json.dumps(body).encode(), **KEY)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert post(small, b" " * 2001, **KEY)[0] == 413

    def test_the_queue(self, small: Served) -> None:
        body = {"model": "base", "prompt": "A", "n": 2}
        status, answer = post(small, json.dumps(body).encode(), **KEY)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")


def test_a_model_that_fails_ends_the_server(tiny_tokenizer: Any) -> None:
    model = trained("tiny-olmoe")
    service = make_service(model, tiny_tokenizer, {}, EngineConfig(at_once=1))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of order")

    model.register_forward_pre_hook(fail)
    body = json.dumps({**BODY, "model": "base"}).encode()
    with quiet_transformers(), served(service) as running:
        status, answer = post(running, body)
        assert (status, answer["error"]["code"]) == (500, "engine_error")
        assert "out of order" in answer["error"]["message"]
    assert "The model stopped running: RuntimeError: out of order" in str(running.error)
