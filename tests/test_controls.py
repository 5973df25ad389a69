"""The shuffled memory: the same cases and values, put together at random."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from knn_moe import RoutingMemory, attach
from knn_moe.controls import shuffle_values


def order_of(shuffled: RoutingMemory, memory: RoutingMemory, layer: int) -> list[int]:
    """Which case each value of a layer came from."""
    mine, theirs = shuffled.layers[layer].values, memory.layers[layer].values
    same = (mine[:, None] == theirs[None]).all(dim=-1)
    # Texts may share their beginnings; what follows needs values that tell the cases apart.
    assert (same.sum(dim=1) == 1).all()
    return same.int().argmax(dim=1).tolist()


def distinct(memory: RoutingMemory) -> RoutingMemory:
    """With a value of its own for every case, which says whose it is."""
    layers = {
        index: replace(
            layer, values=torch.arange(layer.values.numel()).view_as(layer.values) + 1000.0 * index
        )
        for index, layer in memory.layers.items()
    }
    return replace(memory, layers=layers)


def first_cases(memory: RoutingMemory, count: int) -> RoutingMemory:
    layers = {
        index: replace(layer, keys=layer.keys[:count], values=layer.values[:count])
        for index, layer in memory.layers.items()
    }
    provenance = replace(memory.provenance, key=memory.provenance.key[:count])
    return replace(memory, layers=layers, provenance=provenance)


def test_one_permutation_of_the_values_and_nothing_else(memory: RoutingMemory) -> None:
    known = distinct(memory)
    shuffled = shuffle_values(known)
    orders = [order_of(shuffled, known, index) for index in known.layers]
    assert len(orders) == 2
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(len(known)))
    moved = sum(place != case for place, case in enumerate(orders[0]))
    assert moved > 0.9 * len(known)
    for index, layer in known.layers.items():
        assert shuffled.layers[index].keys is layer.keys
        assert shuffled.layers[index].gamma == layer.gamma
    assert shuffled.provenance is known.provenance
    assert shuffled.header is known.header


def test_the_memory_it_was_made_from_stays(memory: RoutingMemory) -> None:
    values = {index: layer.values.clone() for index, layer in memory.layers.items()}
    shuffled = shuffle_values(memory)
    for index, layer in memory.layers.items():
        assert torch.equal(layer.values, values[index])
        assert not torch.equal(shuffled.layers[index].values, values[index])
        assert torch.equal(
            shuffled.layers[index].values.sort(dim=0).values, values[index].sort(dim=0).values
        )


def test_every_order_is_as_likely(memory: RoutingMemory) -> None:
    known = distinct(first_cases(memory, 3))
    found = Counter(tuple(order_of(shuffle_values(known, seed), known, 0)) for seed in range(600))
    assert len(found) == 6
    assert all(65 <= count <= 135 for count in found.values())  # 100 expected
    assert order_of(shuffle_values(known, 7), known, 0) == order_of(
        shuffle_values(known, 7), known, 0
    )


def test_opened_attached_and_saved(
    model: PreTrainedModel, memory: RoutingMemory, prompt: torch.Tensor, tmp_path: Path
) -> None:
    memory.save_pretrained(tmp_path / "memory")
    opened = RoutingMemory.from_pretrained(tmp_path / "memory")  # memory-mapped
    shuffled = shuffle_values(opened)
    assert shuffled.folder is None
    outputs = []
    for one in (None, opened, shuffled):
        if one is None:
            outputs.append(model(prompt, use_cache=False).logits)
        else:
            with attach(model, one):
                outputs.append(model(prompt, use_cache=False).logits)
    base, real, control = outputs
    assert not torch.equal(control, base)
    assert not torch.equal(control, real)
    shuffled.save_pretrained(tmp_path / "control")
    again = RoutingMemory.from_pretrained(tmp_path / "control")
    with attach(model, again):
        assert torch.equal(model(prompt, use_cache=False).logits, control)
