"""`knn-moe explain`: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import make_texts
from helpers.commands import assert_refused, run_cli, save_model
from knn_moe import RoutingConfig, RoutingMemory, attach
from knn_moe.cli.common import load_model

PROMPT = make_texts(1, seed=5, shortest=9, longest=9)[0]


def explained(model: Path, memory: Path, ids: list[int], **settings: Any) -> dict[str, Any]:
    """The same in Python, as JSON has it."""
    network, tokenizer = load_model(str(model), None, "auto")
    opened = RoutingMemory.from_pretrained(memory)
    with attach(network, opened, RoutingConfig(**settings) if settings else None) as routing:
        told = routing.explain(torch.tensor([ids]), tokenizer=tokenizer)
    return json.loads(json.dumps(told.to_dict()))


def test_prints_what_python_gives(saved_model: Path, saved_memory: Path) -> None:
    ids = [int(word) for word in PROMPT.split()]
    shown = json.loads(
        run_cli("explain", saved_model, PROMPT, "--memory", saved_memory, "--json").stdout
    )
    assert shown == explained(saved_model, saved_memory, ids)
    more = run_cli(
        "explain", saved_model, PROMPT, "--memory", saved_memory, "-k", 3, "--layer", 1, "--json"
    )
    expected = explained(saved_model, saved_memory, ids, k=3, layers=(0, 1))
    assert json.loads(more.stdout)["layers"] == [1]
    for token, whole in zip(
        json.loads(more.stdout)["sequences"][0], expected["sequences"][0], strict=True
    ):
        assert token["cases"] == whole["cases"][1:]


def test_the_terminal(saved_model: Path, saved_memory: Path) -> None:
    lines = run_cli("explain", saved_model, PROMPT, "--memory", saved_memory).stdout.splitlines()
    assert len(lines) == 1 + 9
    assert [line.split("|")[1].strip() for line in lines[1:]] == PROMPT.split()
    assert all(re.search(r" [01]\.\d\d +[012]/2 +[01]  .*\[ ?\d+\]", line) for line in lines[1:])
    detail = run_cli(
        "explain", saved_model, PROMPT, "--memory", saved_memory, "--layer", 1, "--layer", 0
    )
    parts = detail.stdout.split("\n\n")
    assert [part.splitlines()[0] for part in parts] == ["layer 0", "layer 1"]
    assert all(len(part.splitlines()) == 2 + 9 for part in parts)
    assert re.search(r"in \d \([+-]\d\.\d\d\).* out \d \([+-]\d\.\d\d\)", detail.stdout)
    last = run_cli("explain", saved_model, PROMPT, "--memory", saved_memory, "--tokens", 2).stdout
    assert last.splitlines() == [lines[0], *lines[-2:]]


def test_what_it_generates_too(saved_model: Path, saved_memory: Path) -> None:
    options = ("--memory", saved_memory, "--max-new-tokens", 4, "--json")
    said = json.loads(run_cli("generate", saved_model, PROMPT, *options).stdout)["text"]
    shown = json.loads(run_cli("explain", saved_model, PROMPT, *options).stdout)
    words = " ".join(str(token["id"]) for token in shown["sequences"][0])
    assert words == f"{PROMPT} {said}"


def test_a_page(saved_model: Path, saved_memory: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    result = run_cli("explain", saved_model, PROMPT, "--memory", saved_memory, "-o", page)
    assert "Wrote" in result.stderr
    assert "Wrote" not in result.stdout
    html = page.read_text(encoding="utf8")
    assert "Recalled while this token was read" in html
    assert str(saved_model) in html
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_silent_memory(saved_model: Path, saved_memory: Path, tmp_path: Path) -> None:
    silent = RoutingMemory.from_pretrained(saved_memory)
    routing = replace(silent.routing, confidence_factor=0.0)
    replace(silent, manifest=replace(silent.manifest, routing=routing)).save_pretrained(
        tmp_path / "m"
    )
    result = run_cli("explain", saved_model, PROMPT, "--memory", tmp_path / "m")
    assert result.stdout == "The memory is turned off: it is attached to no layer.\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "Missing option '--memory'"),
        (("--memory", "REF"), "No memory at"),
        (("--memory", "MEMORY", "--layer", 7), "layer 7. Attached are: [0, 1]"),
        (("--memory", "MEMORY", "--tokens", 0), "0"),
        (("--memory", "MEMORY", "--max-new-tokens", -1), "-1"),
        (("--memory", "MEMORY", "-k", 0), "k must be a whole number of at least 1"),
        (("--memory", "MEMORY", "--chat"), "no chat template"),
        (("--memory", "MEMORY", "-o", "OUT/no/page.html"), "There is no folder"),
        (("--memory", "MEMORY", "-o", "OUT"), "is a directory"),
        (("--memory", "MEMORY", "--device", "abacus"), "abacus"),
    ],
)
def test_wrong_calls(
    options: tuple[object, ...],
    says: str,
    saved_model: Path,
    saved_memory: Path,
    reference_file: Path,
    tmp_path: Path,
) -> None:
    places = {"MEMORY": saved_memory, "REF": reference_file, "OUT": tmp_path}
    for name, path in places.items():
        options = tuple(str(option).replace(name, str(path)) for option in options)
    assert_refused(run_cli("explain", saved_model, PROMPT, *options), says)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_no_page(saved_model: Path, saved_memory: Path, tmp_path: Path) -> None:
    page = ("-o", tmp_path / "page.html")
    assert_refused(
        run_cli("explain", saved_model, "", "--memory", saved_memory, *page), "has no tokens"
    )
    other = save_model("qwen3_moe", tmp_path / "other")
    refused = run_cli("explain", other, PROMPT, "--memory", saved_memory, *page)
    assert_refused(refused, "This memory was built for")
    assert not (tmp_path / "page.html").exists()


def test_help_needs_no_torch() -> None:
    check = "import sys, knn_moe.cli.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
