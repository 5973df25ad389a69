"""How a notebook and print show statistics and memories."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from knn_moe import RoutingConfig, RoutingMemory, attach, attach_all


def cells(html: str) -> list[list[str]]:
    """The texts of each row of a table."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_stats_are_a_mapping_and_a_table(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing:
        zoo_olmoe(prompt, use_cache=False)
    stats = routing.stats()
    head, first, *_ = cells(stats._repr_html_())
    assert head == ["layer", "calls", "tokens", "mean λ", "rerouted"]
    one = stats[0]
    assert first == ["0", "1", "9", f"{one.mean_confidence:.2f}", f"{one.changed:.0%}"]
    assert len(cells(stats._repr_html_())) == 1 + len(stats)
    assert str(stats).splitlines()[2].split() == first
    assert repr(stats).startswith("{0: LayerStats(")
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(stats=False)) as routing:
        zoo_olmoe(prompt, use_cache=False)
    assert cells(routing.stats()._repr_html_())[1][-1] == "-"


def test_stats_of_several_memories_are_one_table(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    memories = {"one": zoo_memory, "<two>": zoo_memory}
    with attach_all(zoo_olmoe, memories) as routing, routing.using("<two>"):
        zoo_olmoe(prompt, use_cache=False)
    stats = routing.stats()
    rows = cells(stats._repr_html_())
    layers = len(stats["one"])
    assert rows[0][0] == "memory"
    assert [row[0] for row in rows[1:]] == ["one"] * layers + ["&lt;two&gt;"] * layers
    assert [row[3] for row in rows[1:]] == ["0"] * layers + ["9"] * layers
    assert "<two>" in str(stats)


def test_a_memory_is_shown_by_its_most_important_facts(zoo_memory: RoutingMemory) -> None:
    facts = dict(cells(zoo_memory._repr_html_()))
    assert facts["cases per layer"] == f"{len(zoo_memory):,}"
    assert facts["examples"] == f"{zoo_memory.provenance.num_examples}"
    assert facts["layers"] == f"{len(zoo_memory.layers)}"
    assert facts["used with"] == "k 1, similarity rbf"
    assert "calibrated" not in facts
    named = replace(zoo_memory.base_model, name="<img src=x>")
    memory = replace(zoo_memory, manifest=replace(zoo_memory.manifest, base_model=named))
    assert "Routing memory for &lt;img src=x&gt;" in memory._repr_html_()
    assert "<img" not in memory._repr_html_()
