"""A judge behind an endpoint: a real server on this machine that speaks the protocol."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from helpers.commands import knn_moe
from helpers.tiny import model, tokenizer  # noqa: F401
from knn_moe import label
from knn_moe.errors import ConfigError, LabelError
from knn_moe.labels.endpoint import EndpointJudge, read_score
from labels.test_label import PROMPTS, QUICK, SHORT, completions, prompts  # noqa: F401

KEY = "sk-a-key-that-nobody-may-see"


@dataclass
class Endpoint:
    """A server on this machine that speaks the protocol: what it was asked, what it will say."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    replies: list[tuple[int, Any]] = field(default_factory=list)  # then the last again
    more: dict[str, str] = field(default_factory=dict)  # headers of what is not 200


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known.asked.append({"path": self.path, **json.loads(body)})
            known.headers.append(dict(self.headers))
            status, said = known.replies[min(len(known.asked), len(known.replies)) - 1]
            if callable(said):
                said = said(json.loads(body))
            content = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            data = said if isinstance(said, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in known.more.items() if status != 200 else ():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    known = Endpoint(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield known
    server.shutdown()
    server.server_close()
    thread.join()


def judge_at(endpoint: Endpoint, **settings: Any) -> EndpointJudge:
    return EndpointJudge(endpoint.url, "judge-1", pause=0.0, **settings)


def test_a_judge_behind_an_endpoint(
    endpoint: Endpoint, model: PreTrainedModel, tokenizer: Any
) -> None:
    def reply(body: dict[str, Any]) -> str:
        return "9" if "door" in body["messages"][1]["content"] else "Score: 2/10"

    endpoint.replies = [(200, reply)]
    config = replace(SHORT, by="judge", keep=None)
    found = label(model, tokenizer, PROMPTS, config, judge=judge_at(endpoint, api_key=KEY))
    assert [one.score for one in found] == [0.9, *[0.2] * 5]
    assert [one.kept for one in found] == [True, *[False] * 5]
    first = endpoint.asked[0]
    assert (first["path"], first["model"]) == ("/v1/chat/completions", "judge-1")
    assert first["messages"][0]["role"] == "system"
    shown = first["messages"][1]["content"]
    assert PROMPTS[0] in shown
    assert completions(found)[0].strip() in shown
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.replies = [(200, "10"), (401, f"Incorrect API key provided: {KEY}".encode())]
    judge = judge_at(endpoint)
    assert judge("a", "b") == 1
    assert "Authorization" not in endpoint.headers[0]
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(LabelError) as refused:
        judge("a", "b")
    assert endpoint.headers[1]["Authorization"] == f"Bearer {KEY}"
    assert "HTTP 401" in str(refused.value)
    assert "Incorrect API key provided: [key]" in str(refused.value)
    assert len(endpoint.asked) == 2  # not tried again
    for shown in (str(refused.value), repr(judge), repr(judge_at(endpoint, api_key=KEY))):
        assert KEY not in shown


def test_what_may_pass_is_tried_again(endpoint: Endpoint) -> None:
    endpoint.more = {"Retry-After": "0"}
    endpoint.replies = [(429, b"slow down"), (503, b"busy"), (200, "7")]
    assert judge_at(endpoint)("a", "b") == 0.7
    assert len(endpoint.asked) == 3
    endpoint.replies = [(503, b"busy")]
    with pytest.raises(LabelError, match="could not be asked in 3 tries: HTTP 503, 'busy'"):
        judge_at(endpoint, retries=2)("a", "b")
    assert len(endpoint.asked) == 6


def test_a_redirect_is_not_followed(endpoint: Endpoint) -> None:
    endpoint.more, endpoint.replies = {"Location": f"{endpoint.url}/elsewhere"}, [(302, b"")]
    with pytest.raises(LabelError, match="HTTP 302"):
        judge_at(endpoint, api_key=KEY)("a", "b")
    assert len(endpoint.asked) == 1


def test_what_is_no_such_endpoint_is_told(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, b"<html>")]
    with pytest.raises(LabelError, match="did not answer in JSON"):
        judge_at(endpoint)("a", "b")
    endpoint.replies = [(200, b'{"error": "x"}')]
    with pytest.raises(LabelError, match="is it an OpenAI-compatible endpoint"):
        judge_at(endpoint)("a", "b")
    nobody = EndpointJudge("http://127.0.0.1:9", "judge-1", pause=0.0, retries=1)
    with pytest.raises(LabelError, match=r"could not be asked in 2 tries: .*refused"):
        nobody("a", "b")
    for url, says in (
        ("file:///etc/passwd", "begins with http"),
        ("http://me:secret@host/v1", "must not hold a password"),
    ):
        with pytest.raises(ConfigError, match=says) as refused:
            EndpointJudge(url, "judge-1")
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["", "/v1", "/v1/", "/v1/chat/completions"])
def test_addresses(url: str) -> None:
    assert EndpointJudge(f"http://h{url}", "m").address == "http://h/v1/chat/completions"


@pytest.mark.parametrize(
    ("reply", "score"),
    [("8", 0.8), ("7.5/10", 0.75), ("<think>maybe 3</think>\n10", 1.0), ("0", 0.0)],
)
def test_replies_are_read(reply: str, score: float) -> None:
    assert read_score(reply) == pytest.approx(score)


@pytest.mark.parametrize("reply", ["", "right", "-3", "100"])
def test_a_reply_without_a_number_is_no_verdict(reply: str) -> None:
    assert math.isnan(read_score(reply))


def test_by_command_with_a_judge(
    endpoint: Endpoint, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    endpoint.replies = [(200, "9"), (200, "no idea"), (200, "4")]
    output = tmp_path / "reference.jsonl"
    judge = ("--judge", endpoint.url, "--judge-model", "judge-1")
    result = knn_moe("label", "tiny-olmoe", prompts, "-o", output, *QUICK, *judge)
    assert result.exit_code == 0, result.output
    assert "Kept 1 of 6 prompts (no score for 1)" in result.stdout
    assert KEY not in result.output + output.read_text()
    endpoint.replies = [(400, b"no such model")]
    before = output.read_text()
    failed = knn_moe("label", "tiny-olmoe", prompts, "-o", output, *QUICK, *judge, "--overwrite")
    assert failed.exit_code == 2
    assert "no such model" in " ".join(failed.stderr.split())
    assert output.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "reference.jsonl"]
