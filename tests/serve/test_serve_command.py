"""`knn-moe serve` in a process of its own: it starts, drains, is interrupted, and refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedModel

from helpers.commands import assert_refused, run_cli
from helpers.served import two_memories
from knn_moe.support.embedded_models import embedded_model

_RUN = "from knn_moe.cli.main import main; main()"
LONG = {"model": "law", "prompt": "A fever is", "max_tokens": 600, "temperature": 0}


@pytest.fixture(scope="module")
def law(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("memories") / "law"
    two_memories(tiny_olmoe, tiny_tokenizer)["law"].save_pretrained(folder)
    return folder


@contextmanager
def serving(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    words = ["serve", "tiny-olmoe", "--dtype", "float32", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, *words],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"Serving (.*) on (http://\S+)/v1", line):
                    assert process.stderr.readline() == f"Try it in a browser: {found[2]}/\n"
                    yield process, found[2]
                    break
            else:
                raise AssertionError("The server did not start.")
        finally:
            process.kill()


def read_events(response: httpx2.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])
        elif line:
            assert line == "data: [DONE]"
            yield None


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish(law: Path) -> None:
    with serving("--memory", f"law={law}") as (process, url), httpx2.Client(timeout=60) as client:
        body = {**LONG, "stream": True}
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            events = read_events(response)
            assert next(events)["model"] == "law"
            process.send_signal(signal.SIGTERM)
            while httpx2.get(f"{url}/health").status_code == 200:
                pass
            refused = httpx2.post(f"{url}/v1/completions", json=LONG)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "stopping"
            *_, last, done = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert done is None
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_ctrl_c_ends_it_at_once(law: Path, busy: bool) -> None:
    with serving("--memory", f"law={law}") as (process, url), httpx2.Client(timeout=60) as client:
        body = {**LONG, "stream": True}
        if busy:
            with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                assert next(read_events(response)) is not None
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=20) == 130
        else:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 130
        assert process.stderr is not None
        said = process.stderr.read()
        assert said.split() == ["Interrupted."], said


@pytest.mark.slow
def test_the_key_comes_from_the_environment() -> None:
    with serving(KNN_MOE_API_KEY="secret") as (process, url):
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        models = httpx2.get(f"{url}/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in models] == ["tiny-olmoe"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


MODEL = embedded_model("tiny-olmoe")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "folder"], "takes a name and a folder, as in law=memories/law; got 'folder'"),
        (["--memory", "=folder"], "takes a name and a folder"),
        (["--memory", "law="], "takes a name and a folder"),
        (["--memory", "law=a", "--memory", "law=b"], "two memories named 'law'"),
        (["--memory", "law=/not/there"], "/not/there"),
        (["-k", "2"], "-k needs a --memory"),
        (["--port", "70000"], "70000"),
        (["--host", "no.such.host.invalid"], "Cannot listen on no.such.host.invalid"),
        (["--allow-loading", "/not/there"], "/not/there"),
        (["--api-key", ""], "The API key is empty"),
        (["--max-seconds", "0"], "--max-seconds"),
        (["--name", "a b"], "'a b' is none"),
    ],
)
def test_bad_input(arguments: list[str], words: str) -> None:
    assert_refused(run_cli("serve", MODEL, "--port", "0", *arguments), words)


def test_options_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('port = 0\nmemory = ["law=a", "law=b"]\n', encoding="utf8")
    assert_refused(run_cli("serve", MODEL, "--config", path), "two memories named 'law'")


def test_memories_and_models_that_do_not_belong_together(law: Path, saved_model: Path) -> None:
    result = run_cli("serve", saved_model, "--port", "0", "--memory", f"law={law}")
    assert_refused(result, "built for 'tiny-olmoe'")
    result = run_cli("serve", MODEL, "--port", "0", "--name", "law", "--memory", f"law={law}")
    assert_refused(result, "'law' is the name of the model")
    result = run_cli("serve", MODEL, "--port", "0", "--memory", f"l w={law}")
    assert_refused(result, "'l w' is none")
    assert_refused(run_cli("serve", "tiny-olmo"), "Did you mean 'tiny-olmoe'?")


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_cli("serve", MODEL, "--port", port)
    assert_refused(result, f"Cannot listen on 127.0.0.1 port {port}: Address already in use")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    result = run_cli("serve", MODEL)
    assert_refused(result, "needs transformers 5.22 or newer, and 5.17.0 is installed")
    monkeypatch.setattr("knn_moe.cli.serve.find_spec", lambda name: None)
    assert_refused(run_cli("serve", MODEL), "pip install 'knn-moe[serve]'")
