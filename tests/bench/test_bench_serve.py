"""`knn-moe bench serve` on tiny sizes: real servers, its numbers, and servers that fail."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers.commands import assert_refused, run_cli
from knn_moe.bench.clients import Answer, Answered, Load, ask_many
from knn_moe.bench.serve_speed import (
    Case,
    ServeBench,
    ServeMeasure,
    measure_serving,
    percentile,
    resident_megabytes,
)
from knn_moe.errors import ServeError

TINY = ("--clients", 3, "--seconds", 0.5, "--prompt", 4, "--tokens", 3, "--keys", 64)


@pytest.mark.slow
def test_servers_are_asked_in_turns() -> None:
    result = run_cli(
        "bench", "serve", "--shape", "small", *TINY,
        "--memories", 2, "--kind", "distilled", "--prototypes", 8, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rows = found["rows"]
    assert [row["case"] for row in rows] == ["base", "1 distilled", "2 distilled"]
    assert found["settings"]["cases"] == [row["case"] for row in rows]
    for row in rows:
        assert row["errors"] == []
        assert row["answers"] >= 2 * 3  # each client asks at least once in each round
        assert row["seconds"] == 0.5
        ratio = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        assert row["times_base"] == pytest.approx(ratio)
        first, whole = row["first_token_seconds"], row["latency_seconds"]
        assert 0 < first["p50"] <= whole["p50"] <= whole["p95"] <= whole["p99"]
        assert len(row["megabytes"]) >= 2
        assert min(row["megabytes"]) > 50


@pytest.mark.slow
def test_a_table() -> None:
    result = run_cli(
        "bench", "serve", "tiny-olmoe", *TINY,
        "--only", "1 full", "--prototypes", 8, "--rounds", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in ("tiny-olmoe, 3 clients", "1 full", "× base", "RSS MB"):
        assert words in result.stdout


def test_bad_input() -> None:
    both = run_cli("bench", "serve", "tiny-olmoe", "--shape", "small")
    assert_refused(both, "Give a MODEL or a --shape, not both.")
    other = run_cli("bench", "serve", "--only", "9 full")
    assert_refused(other, "There is no case '9 full'. Available: base, 1 full, 8 full")
    few = run_cli("bench", "serve", "--keys", 10, "--prototypes", 11)
    assert_refused(few, "10 keys has no 11 prototypes")
    assert_refused(run_cli("bench", "serve", "--shape", "huge"), "Unknown shape 'huge'")


@pytest.mark.slow
def test_a_server_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knn_moe.bench.serve_speed._RUN", "raise SystemExit('out of order')")
    bench = ServeBench(model="tiny-olmoe", cases=(Case("base"),), load=Load(clients=1))
    with pytest.raises(ServeError, match="did not start: out of order"):
        measure_serving(bench)


class _Stub(BaseHTTPRequestHandler):
    """Streams two chunks of two tokens and one, then refuses or breaks off."""

    protocol_version = "HTTP/1.1"
    asked: list[str]
    ends: str

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body["model"])
        chunks: list[object] = [
            {"choices": [{"token_ids": []}]},
            {"choices": [{"token_ids": [1, 2]}]},
            {"choices": [{"token_ids": [3]}]},
        ]
        refuses = len(self.asked) > 4
        if refuses and self.ends == "error":
            chunks.append({"error": {"message": "out of order"}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        content = "".join(lines).encode()
        status = 429 if refuses and self.ends == "status" else 200
        if status == 429:
            content = json.dumps({"error": {"message": "too many"}}).encode()
        self.send_response(status)
        length = len(content) + (refuses and self.ends == "length")
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = refuses

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[tuple[int, type[_Stub]]]:
    """The port of a server that fails from the fifth request on."""
    handler = type("Handler", (_Stub,), {"asked": [], "ends": "status"})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], handler
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("ends", "words"), [("status", "too many"), ("error", "out of order")])
def test_what_clients_count(stub: tuple[int, type[_Stub]], ends: str, words: str) -> None:
    port, handler = stub
    handler.ends = ends
    got = ask_many(port, ["a", "b"], 10, Load(clients=1, prompt=2, tokens=3), seconds=60)
    assert handler.asked == ["a", "b", "a", "b", "a"]
    assert (len(got.answers), got.tokens, got.errors) == (4, 12, [words])
    assert all(0 < answer.first <= answer.whole for answer in got.answers)


def test_tokens_that_come_too_late_do_not_count(stub: tuple[int, type[_Stub]]) -> None:
    got = ask_many(stub[0], ["a"], 10, Load(clients=1), seconds=1e-9)
    assert (got.tokens, got.answers) == (0, [])


def test_numbers_by_hand() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(list(range(1, 101)), 0.95) == 95
    assert percentile([1, 2], 0.99) == 2
    got = Answered(seconds=2, tokens=30, answers=[Answer(0.5, 1.0)])
    got.add(Answered(seconds=1, tokens=30, answers=[Answer(1.5, 2.0)], errors=["no"]))
    row = ServeMeasure("1 full", got, 40.0, [100.0, 110.0])
    assert (row.tokens_per_second, row.times_base) == (20, 0.5)
    assert (row.first_token(0.5), row.latency(0.99)) == (0.5, 2.0)
    assert row.to_dict()["errors"] == ["no"]
    assert (resident_megabytes(os.getpid()) or 51) > 50
    assert resident_megabytes(1 << 30) is None
