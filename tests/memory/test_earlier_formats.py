"""Memories written by an earlier version: they load, and give the logits they gave then.

`format-4` was written by the last version of that format (commit 6bda01d), from the texts below:
`strong` as it was built by a preset that this version does not have, `calibrated` with widths for
each layer and a head, `merged` with a γ for each of two domains, `fast` compressed.
`logits.safetensors` has the prompt, and the logits of its last four tokens with each of them. The
texts of `calibrated` repeat each other, so that many of its cases are equally near: all of them are
recalled, not the nearest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.large_steps import LARGE_ROUTING, LARGE_STEPS
from helpers.near_ties import assert_no_near_ties
from helpers.tiny import trained, words
from knn_moe import RoutingMemory, attach, build_memory
from knn_moe.memory.files import read_config
from knn_moe.memory.manifest import MemoryManifest

FOLDER = Path(__file__).parent / "format-4"
TEXTS = [
    "A fever is a rise in body temperature.",
    "The court shall hear the appeal.",
    "def read(path):\n    return path.read_text()",
    "Once upon a time there was a small boat.",
    "Light bends when it enters water.",
]


@pytest.mark.parametrize("name", ["strong", "calibrated", "merged", "fast"])
def test_it_gives_the_logits_it_gave(name: str) -> None:
    expected = load_file(FOLDER / "logits.safetensors")
    model, memory = trained("tiny-olmoe"), RoutingMemory.from_pretrained(FOLDER / name)
    # A memory of several domains has one γ now; a γ that is given was one for all before, too.
    config = replace(memory.routing, gamma=0.5) if name == "merged" else memory.routing
    if name == "calibrated":
        head = replace(memory.routing.head, k=len(memory))
        config = replace(memory.routing, k=len(memory), head=head)
    else:
        assert_no_near_ties(model, memory, expected["input_ids"], config)
    with torch.no_grad(), attach(model, memory, config):
        logits = model(expected["input_ids"]).logits[0, -4:]
    torch.testing.assert_close(logits, expected[name], rtol=0, atol=1e-4)
    assert not torch.allclose(logits, expected["alone"], atol=1e-3)


@pytest.mark.slow
def test_the_same_texts_build_the_same_memory() -> None:
    earlier = RoutingMemory.from_pretrained(FOLDER / "strong").full_layers()
    built = build_memory(trained("tiny-olmoe"), words(), TEXTS, LARGE_STEPS)
    for number, layer in built.full_layers().items():
        torch.testing.assert_close(layer.keys, earlier[number].keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(layer.values, earlier[number].values, rtol=0, atol=1e-3)
        assert layer.gamma == pytest.approx(earlier[number].gamma, rel=1e-4)


def test_an_unknown_preset_becomes_the_papers_and_its_fields_stay() -> None:
    memory = RoutingMemory.from_pretrained(FOLDER / "strong")
    assert read_config(FOLDER / "strong")["build"]["preset"] == "strong"
    assert memory.build == LARGE_STEPS
    assert memory.routing == LARGE_ROUTING


def test_a_gate_is_dropped_with_a_warning() -> None:
    """Format 4 could leave some tokens to the router; this version cannot, and says so."""
    config = read_config(FOLDER / "strong")
    manifest = MemoryManifest.from_dict(config)
    gated = {**config, "routing": {**config["routing"], "gate": "entropy"}}
    with pytest.warns(UserWarning, match="names a gate"):
        assert MemoryManifest.from_dict(gated) == manifest
