"""One memory for all requests, uncompiled and compiled; and the plugin installed but unused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from knn_moe import RoutingMemory
from knn_moe.errors import KnnMoeError

from compare import TOLERANCE, Reference, ask, engine, told
from knn_moe_vllm import loading
from made import PROMPTS


@pytest.mark.parametrize("name", ["A", "C"])
def test_a_compiled_server_has_one_memory(olmoe: Reference, name: str) -> None:
    settings = {"knn_moe": {"memory": str(olmoe.memories[name])}}
    with engine(olmoe.folder, enforce_eager=False, additional_config=settings) as llm:
        mode = llm.llm_engine.vllm_config.compilation_config.mode
        answers = ask(llm, PROMPTS, [None] * len(PROMPTS))
    assert mode.name != "NONE"
    assert olmoe.largest_error(answers, name) < TOLERANCE


@pytest.mark.parametrize(
    ("memory", "message"),
    [("missing", "there is no such folder"), ("other", "has other routers")],
)
def test_a_server_does_not_start_with_what_it_cannot_use(
    olmoe: Reference, tmp_path: Path, memory: str, message: str
) -> None:
    opened = RoutingMemory.from_pretrained(olmoe.memories["A"])
    other = replace(opened.base_model, fingerprint="0" * 64)
    manifest = replace(opened.manifest, base_model=other)
    replace(opened, manifest=manifest).save_pretrained(tmp_path / "other")
    settings = {"knn_moe": {"memory": str(tmp_path / memory)}}
    with (
        pytest.raises(KnnMoeError, match=message),
        engine(olmoe.folder, additional_config=settings),
    ):
        pass


def test_requests_that_name_none_use_the_servers_memory(olmoe: Reference) -> None:
    settings = {"knn_moe": {"memory": str(olmoe.memories["A"])}}
    asked = [(prompt, name) for prompt in PROMPTS[:12] for name in (None, "B")]
    with engine(olmoe.folder, enable_lora=True, additional_config=settings) as llm:
        answers = ask(llm, [prompt for prompt, _ in asked], [olmoe.request(n) for _, n in asked])
    assert olmoe.largest_error(answers[::2], "A") < TOLERANCE
    assert olmoe.largest_error(answers[1::2], "B") < TOLERANCE


WITHOUT = """
import json, sys
from compare import ask, engine, told
from made import PROMPTS

with engine(sys.argv[1]) as llm:
    answers = ask(llm, PROMPTS, [None] * len(PROMPTS))
assert "knn_moe_vllm" not in sys.modules
print(json.dumps(told(answers)))
"""


def test_installed_but_unused_it_changes_nothing(olmoe: Reference) -> None:
    """Tokens and log-probabilities are those of a process that does not load the plugin."""
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(olmoe.folder)],
        env={**os.environ, "VLLM_PLUGINS": "none", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    expected = json.loads(process.stdout.splitlines()[-1])
    with engine(olmoe.folder) as llm:
        answers = ask(llm, PROMPTS, [None] * len(PROMPTS))
    assert [[list(each) for each in answer] for answer in told(answers)] == expected


def test_slots_answer_as_memories_by_rows(
    olmoe: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where CUDA graphs would be recorded, memories lie in slots; here they do so without them."""
    monkeypatch.setattr(loading, "records_graphs", lambda vllm_config: True)
    settings = {"knn_moe": {"memory": str(olmoe.memories["B"]), "prototypes": 48}}
    asked = [(prompt, name) for prompt in PROMPTS[:12] for name in (None, "A")]
    with engine(olmoe.folder, enable_lora=True, max_loras=1, additional_config=settings) as llm:
        with pytest.raises(Exception, match="memories that requests name must be distilled"):
            llm.llm_engine.add_lora(olmoe.request("C"))
        answers = ask(llm, [prompt for prompt, _ in asked], [olmoe.request(n) for _, n in asked])
    assert olmoe.largest_error(answers[::2], "B") < TOLERANCE
    assert olmoe.largest_error(answers[1::2], "A") < TOLERANCE
