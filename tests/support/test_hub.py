"""A hub that does not reply is asked once; one that refuses is asked as usual."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants

from knn_moe.support.hub import hub_or_cache


class Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_hub_that_refuses_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.handle_request, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with hub_or_cache() as reached:
            assert reached
            assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_reply_only_the_cache_is_read(
    offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        closed = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with hub_or_cache() as reached:
        assert not reached
        assert constants.is_offline_mode()
    assert constants.is_offline_mode() is offline


def test_a_hub_that_does_not_reply_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("knn_moe.support.hub._TIMEOUT", 0.1)
        silent.settimeout(0.1)
        for _ in range(3):
            with hub_or_cache() as reached:
                assert not reached
        with suppress(TimeoutError):
            while True:
                asked.append(silent.accept()[0])
    for connection in asked:
        connection.close()
    assert len(asked) == 1


def test_threads_that_overlap_leave_the_hub_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    first, second = hub_or_cache(), hub_or_cache()
    for enter in (first, second):
        with ThreadPoolExecutor(1) as thread:
            assert not thread.submit(enter.__enter__).result()
    first.__exit__(None, None, None)
    assert constants.is_offline_mode()
    second.__exit__(None, None, None)
    assert not constants.is_offline_mode()
