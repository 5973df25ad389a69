"""`knn-moe explain`: what it prints and what it writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from click.testing import Result
from transformers import AutoConfig

from helpers.commands import assert_refused, run_cli, save_model
from helpers.zoo import make_texts
from knn_moe import RoutingConfig, RoutingMemory, attach
from knn_moe.cli.common import load_model

PROMPT = make_texts(1, seed=5, shortest=9, longest=9)[0]


def explain(model: Path, memory: Path, *options: object) -> Result:
    return run_cli("explain", model, PROMPT, "--memory", memory, *options)


def explain_in_python(
    model: Path, memory: Path, config: RoutingConfig | None = None
) -> dict[str, Any]:
    """Return the explanation of PROMPT as JSON gives it back."""
    network, tokenizer = load_model(str(model), None, "auto")
    ids = torch.tensor([[int(word) for word in PROMPT.split()]])
    with attach(network, RoutingMemory.from_pretrained(memory), config) as routing:
        explanation = routing.explain(ids, tokenizer=tokenizer)
    return json.loads(json.dumps(explanation.to_dict()))


def test_json_is_what_python_gives(saved_model: Path, saved_memory: Path) -> None:
    shown = json.loads(explain(saved_model, saved_memory, "--json").stdout)
    assert shown == explain_in_python(saved_model, saved_memory)
    one = json.loads(explain(saved_model, saved_memory, "-k", 3, "--layer", 1, "--json").stdout)
    both = explain_in_python(saved_model, saved_memory, RoutingConfig(k=3, layers=(0, 1)))
    assert one["layers"] == [1]
    for token, whole in zip(one["sequences"][0], both["sequences"][0], strict=True):
        assert token["effects"] == whole["effects"][1:]
        assert [len(effect["cases"]) for effect in token["effects"]] == [3]


def test_the_terminal(saved_model: Path, saved_memory: Path) -> None:
    lines = explain(saved_model, saved_memory).stdout.splitlines()
    head, *rows = lines[:10]
    assert head.split() == ["token", "mean", "λ", "changed", "next", "token", "layer", "recalled"]
    assert [line.split("|")[1].strip() for line in rows] == PROMPT.split()
    moves = r" [01]\.\d\d +[012]/2 +(\S+% → \S+%)? +[01]  .*\[ ?\d+\]"
    assert all(re.search(moves, line) for line in rows)
    assert lines[10].startswith("what may come next: | ")
    assert all(len(line) <= 80 for line in lines)
    detail = explain(saved_model, saved_memory, "--layer", 1, "--layer", 0).stdout
    parts = detail.split("\n\n")
    assert [part.splitlines()[0] for part in parts] == ["layer 0", "layer 1"]
    assert all(len(part.splitlines()) == 2 + 9 for part in parts)
    assert re.search(r"in \d \([+-]\d\.\d\d\).* out \d \([+-]\d\.\d\d\)", detail)
    last = explain(saved_model, saved_memory, "--tokens", 2).stdout
    assert last.splitlines() == [head, *rows[-2:], *lines[10:]]


def test_a_prompt_that_is_too_long_is_told(saved_model: Path, saved_memory: Path) -> None:
    limit = AutoConfig.from_pretrained(saved_model).max_position_embeddings
    refused = run_cli("explain", saved_model, "5 " * (limit + 1), "--memory", saved_memory)
    assert_refused(refused, f"has {limit + 1:,} tokens, and the model reads at most {limit:,}")


def test_generated_tokens_are_explained_too(saved_model: Path, saved_memory: Path) -> None:
    options = ("--memory", saved_memory, "--max-new-tokens", 4, "--json")
    text = json.loads(run_cli("generate", saved_model, PROMPT, *options).stdout)["text"]
    shown = json.loads(run_cli("explain", saved_model, PROMPT, *options).stdout)
    words = " ".join(str(token["id"]) for token in shown["sequences"][0])
    assert words == f"{PROMPT} {text}"


def test_a_page(saved_model: Path, saved_memory: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    result = explain(saved_model, saved_memory, "-o", page)
    assert re.search(r"Wrote .*page\.html \(\d\.\d MB\)\.", result.stderr.replace("\n", " "))
    assert "Wrote" not in result.stdout
    html = page.read_text(encoding="utf8")
    assert "<html" in html
    assert str(saved_model) in html
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_failure_leaves_no_page(saved_memory: Path, tmp_path: Path) -> None:
    other = save_model("qwen3_moe", tmp_path / "other")
    assert_refused(explain(other, saved_memory, "-o", tmp_path / "page.html"), "was built for")
    assert not (tmp_path / "page.html").exists()


def test_a_memory_that_is_turned_off(saved_model: Path, saved_memory: Path, tmp_path: Path) -> None:
    memory = RoutingMemory.from_pretrained(saved_memory)
    routing = replace(memory.routing, confidence_factor=0.0)
    replace(memory, manifest=replace(memory.manifest, routing=routing)).save_pretrained(
        tmp_path / "m"
    )
    result = explain(saved_model, tmp_path / "m")
    assert result.stdout == "The memory does not route: it is attached to no layer.\n"
