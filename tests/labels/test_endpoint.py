"""A judge behind an endpoint: a real server on this machine that speaks the protocol."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest

from campaigns.endpoints import serve_badly
from helpers.labelling import KEY, Endpoint, serve_endpoint
from knn_moe.errors import ConfigError, LabelError
from knn_moe.labels.endpoint import EndpointJudge, read_score


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve_endpoint() as endpoint:
        yield endpoint


def judge_at(endpoint: Endpoint, **options: Any) -> EndpointJudge:
    return EndpointJudge(endpoint.url, "judge-1", pause=0.0, **options)


@pytest.mark.slow
def test_the_judge_gets_the_prompt_and_the_answer(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, "Score: 9/10")]
    assert judge_at(endpoint, api_key=KEY)("Who opened the door?", "She did.") == 0.9
    (request,) = endpoint.requests
    assert (request["path"], request["model"]) == ("/v1/chat/completions", "judge-1")
    system, user = request["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert "Who opened the door?" in user["content"]
    assert "She did." in user["content"]
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.slow
def test_the_key_comes_from_the_environment_and_is_never_shown(
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
    assert len(endpoint.requests) == 2  # not tried again
    for shown in (str(refused.value), repr(judge), repr(judge_at(endpoint, api_key=KEY))):
        assert KEY not in shown


@pytest.mark.slow
def test_temporary_errors_are_tried_again(endpoint: Endpoint) -> None:
    endpoint.error_headers = {"Retry-After": "0"}
    endpoint.replies = [(429, b"slow down"), (503, b"busy"), (200, "7")]
    assert judge_at(endpoint)("a", "b") == 0.7
    assert len(endpoint.requests) == 3
    endpoint.replies = [(503, b"busy")]
    with pytest.raises(LabelError, match="could not be reached in 3 tries: HTTP 503, 'busy'"):
        judge_at(endpoint, retries=2)("a", "b")
    assert len(endpoint.requests) == 6


@pytest.mark.slow
def test_a_redirect_is_not_followed(endpoint: Endpoint) -> None:
    endpoint.error_headers = {"Location": f"{endpoint.url}/elsewhere"}
    endpoint.replies = [(302, b"")]
    with pytest.raises(LabelError, match="HTTP 302"):
        judge_at(endpoint, api_key=KEY)("a", "b")
    assert len(endpoint.requests) == 1


@pytest.mark.slow
def test_a_server_that_is_not_such_an_endpoint_is_named(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, b"<html>")]
    with pytest.raises(LabelError, match=r"no JSON with a text.*'<html>'"):
        judge_at(endpoint)("a", "b")
    endpoint.replies = [(200, b'{"error": "x"}')]
    with pytest.raises(LabelError, match="Is it an OpenAI-compatible endpoint"):
        judge_at(endpoint)("a", "b")
    nobody = EndpointJudge("http://127.0.0.1:9", "judge-1", pause=0.0, retries=1)
    with pytest.raises(LabelError, match=r"could not be reached in 2 tries: .+"):
        nobody("a", "b")


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("file:///etc/passwd", "must begin with http"),
        ("http://me:secret@host/v1", "must not contain a password"),
    ],
)
def test_bad_addresses_are_refused_without_showing_a_password(url: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error) as refused:
        EndpointJudge(url, "judge-1")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["", "/v1", "/v1/", "/v1/chat/completions"])
def test_the_address_is_completed(url: str) -> None:
    assert EndpointJudge(f"http://h{url}", "m").address == "http://h/v1/chat/completions"


@pytest.mark.parametrize(
    ("reply", "score"),
    [("8", 0.8), ("7.5/10", 0.75), ("<think>maybe 3</think>\n10", 1.0), ("0", 0.0)],
)
def test_the_score_of_a_reply(reply: str, score: float) -> None:
    assert read_score(reply) == pytest.approx(score)


@pytest.mark.parametrize("reply", ["", "right", "-3", "100"])
def test_a_reply_without_a_number_from_0_to_10_has_no_score(reply: str) -> None:
    assert math.isnan(read_score(reply))


def test_the_key_for_the_hub_is_not_sent(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    endpoint.replies = [(200, "5")]
    assert judge_at(endpoint)("a", "b") == 0.5
    assert "Authorization" not in endpoint.headers[0]
    assert "hf_secret" not in str(endpoint.headers[0])


def test_a_judge_on_this_machine_works_offline(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    endpoint.replies = [(200, "5")]
    assert judge_at(endpoint)("a", "b") == 0.5


def test_a_judge_can_be_asked_where_an_event_loop_runs(endpoint: Endpoint) -> None:
    endpoint.replies = [(200, "5")]

    async def ask() -> float:
        return judge_at(endpoint)("a", "b")

    assert asyncio.run(ask()) == 0.5


@pytest.mark.parametrize("name", ["drips the headers", "floods the body", "hangs at once"])
def test_a_request_ends_whatever_the_server_does(name: str) -> None:
    """The campaign `endpoints` has every behaviour."""
    with (
        serve_badly(name) as url,
        pytest.raises(LabelError, match=r"no whole reply in 0.1 seconds|longer than 1,048,576"),
    ):
        EndpointJudge(url, "judge-1", timeout=0.1, retries=0)("a", "b")
